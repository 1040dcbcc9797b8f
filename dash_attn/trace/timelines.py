"""A measured run and the same run in the model, as timelines of SMs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dash_attn.simulate import Machine, Simulation, simulate, task_names
from dash_attn.timeline import COMPUTE, REDUCE, STALL, Timeline
from dash_attn.trace.measured import Measured


def timeline(found: Measured) -> Timeline:
    """Events by SM, as the simulator's by worker."""
    program = found.trace.program
    task, row = np.arange(program.num_tasks), found.sm[found.rows.task_worker]
    granted, staged = found.granted, found.task["staged"]
    waited = granted > staged
    parts = [
        (COMPUTE, task, found.task["begun"], found.task["left"]),
        (REDUCE, task, granted, found.task["landed"]),
        (STALL, task[waited], staged[waited], granted[waited]),
    ]
    return Timeline(
        f"measured: {program.policy}, {program.mask}",
        "us",
        int(found.sm.max(initial=-1)) + 1,
        task_names(program),
        np.concatenate([row[t] for _, t, _, _ in parts]),
        np.concatenate([np.full(len(t), role) for role, t, _, _ in parts]),
        np.concatenate([t for _, t, _, _ in parts]),
        np.concatenate([begin for _, _, begin, _ in parts]),
        np.concatenate([end for _, _, _, end in parts]),
        overlapping=True,
    )


def simulated(found: Measured, model: Machine) -> tuple[Simulation, Timeline]:
    """The same program on the same workers in the model, its rows ordered by SM as well."""
    trace = found.trace
    result = simulate(trace.program, len(found.sm), model, placement=trace.placement)
    line = result.timeline
    title = f"simulated: {trace.program.policy}, {trace.program.mask}"
    return result, replace(line, title=title, workers=int(found.sm.max()) + 1, worker=found.sm[line.worker])
