"""A measured run and the same run in the model, as timelines of SMs."""

from __future__ import annotations

from dataclasses import replace

from dash_attn.simulate import Machine, Simulation, simulate, task_names
from dash_attn.timeline import Timeline, events
from dash_attn.tools.trace.measured import Measured


def timeline(found: Measured) -> Timeline:
    """Events by SM, as the simulator's by worker."""
    program, task = found.trace.program, found.task
    times = (task["begun"], task["left"], task["staged"], found.granted, task["landed"])
    return Timeline(
        f"measured: {program.policy}, {program.mask}",
        "us",
        int(found.sm.max(initial=-1)) + 1,
        task_names(program),
        *events(found.sm[found.rows.task_worker], times),
        overlapping=True,
    )


def simulated(found: Measured, model: Machine) -> tuple[Simulation, Timeline]:
    """The same program on the same workers in the model, its rows ordered by SM as well."""
    trace = found.trace
    result = simulate(trace.program, len(found.sm), model, placement=trace.placement)
    line = result.timeline
    title = f"simulated: {trace.program.policy}, {trace.program.mask}"
    return result, replace(line, title=title, workers=int(found.sm.max()) + 1, worker=found.sm[line.worker])
