"""A measured run and the same run in the model, as timelines of SMs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dash_attn.simulate import Machine, Simulation, simulate, task_names
from dash_attn.timeline import Timeline, events
from dash_attn.tools.trace.measured import Measured


def timeline(run: Measured) -> Timeline:
    """The measured events, a row for each SM. The parts of cut chains come after the tasks."""
    program, task, worker = run.trace.program, run.task, run.rows.task_worker
    times = [task["begun"], task["left"], task["staged"], run.granted, task["landed"]]
    if run.trace.board.parts:
        chains, end = np.argsort(run.trace.placement.chains), run.end  # from placement order to that of the board
        of_parts = (end["slot"], end["staged"], end["staged"], np.maximum(end["turn"], end["staged"]), end["landed"])
        times = [np.append(each, part[chains]) for each, part in zip(times, of_parts, strict=True)]
        worker = np.append(worker, np.repeat(run.rows.chain_worker[chains], run.trace.board.parts))
    return Timeline(
        f"measured: {program.policy}, {program.mask}",
        "us",
        int(run.sm.max(initial=-1)) + 1,
        task_names(program),
        *events(run.sm[worker], times, len(task["begun"])),
        overlapping=True,
    )


def simulated(run: Measured, model: Machine) -> tuple[Simulation, Timeline]:
    """The same program on the same workers in the model, also a row for each SM."""
    trace = run.trace
    result = simulate(trace.program, len(run.sm), model, placement=trace.placement)
    line = result.timeline
    title = f"simulated: {trace.program.policy}, {trace.program.mask}"
    return result, replace(line, title=title, workers=int(run.sm.max()) + 1, worker=run.sm[line.worker])
