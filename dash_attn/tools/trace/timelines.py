"""A measured run and the same run in the model, as timelines of SMs."""

from __future__ import annotations

from dataclasses import replace

from dash_attn.simulate import Machine, Simulation, simulate, task_names
from dash_attn.timeline import Timeline, events
from dash_attn.tools.trace.measured import Measured


def timeline(run: Measured) -> Timeline:
    """Events by SM, as the simulator's by worker."""
    program, task = run.trace.program, run.task
    times = (task["begun"], task["left"], task["staged"], run.granted, task["landed"])
    return Timeline(
        f"measured: {program.policy}, {program.mask}",
        "us",
        int(run.sm.max(initial=-1)) + 1,
        task_names(program),
        *events(run.sm[run.rows.task_worker], times),
        overlapping=True,
    )


def simulated(run: Measured, model: Machine) -> tuple[Simulation, Timeline]:
    """The same program on the same workers in the model, its rows ordered by SM as well."""
    trace = run.trace
    result = simulate(trace.program, len(run.sm), model, placement=trace.placement)
    line = result.timeline
    title = f"simulated: {trace.program.policy}, {trace.program.mask}"
    return result, replace(line, title=title, workers=int(run.sm.max()) + 1, worker=run.sm[line.worker])
