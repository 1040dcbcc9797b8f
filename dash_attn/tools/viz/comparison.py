"""Policies side by side: a table of their simulations with the best one marked, over their charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dash_attn.program import Chain
from dash_attn.simulate import Machine, Simulation, Tickets, Work
from dash_attn.tools.viz.charts import Source, best, charts
from dash_attn.tools.viz.page import Section, report
from dash_attn.tools.viz.palette import ColourBy


def html(sources: Source | Sequence[Source], path: str | Path, *, colour: ColourBy = "q") -> Path:
    """Write a page of charts on one time axis. Simulations also get a table."""
    several = list(sources) if isinstance(sources, Sequence) else [sources]
    simulations = [each for each in several if isinstance(each, Simulation)]
    compared = len(simulations) == len(several) > 0
    section = schedules(simulations) if compared else Section(charts=several)
    return report(path, [section], title="Timelines", colour=colour)


def schedules(simulations: Sequence[Simulation]) -> Section:
    """A section that compares simulations of one problem on one number of workers."""
    drawn = charts(simulations)
    # Writers wait beside the compute of the machine model: only a wait that blocks the worker costs time.
    machine = any(isinstance(each.model, Machine) for each in simulations)
    base = next((each.makespan for each in simulations if each.program.policy == "fa3"), None)
    unit = simulations[0].model.unit
    header = ["policy", f"makespan [{unit}]", "above bound", "bubble", "blocked" if machine else "stall", "vs fa3"]
    rows = [
        [
            each.program.policy,
            f"{each.makespan:.5g}",
            f"{each.gap:.1%}",
            *(f"{lost / (each.workers * each.makespan or 1.0):.1%}" for lost in _lost(each, machine)),
            f"{base / each.makespan:.2f}x" if base and each.makespan else "-",
        ]
        for each in simulations
    ]
    program, workers, model = simulations[0].program, simulations[0].workers, simulations[0].model
    size = f"{_shape(program)}, {len(simulations[0].board.chains)} chains"
    cost = f"For each task, in {model.unit}: compute {model.compute:g}, reduce {model.reduce:g}."
    text = f"{size}, {workers} workers. Simulated in the {model.name} model. {cost}"
    return Section(f"Schedules: {program.mask} mask", text, [header, *rows], simulations, best=best(drawn))


def _shape(program: Work) -> str:
    if isinstance(program, Tickets):
        return f"{len(np.unique(program.board.chains[:, Chain.BATCH]))} documents, {program.num_tickets} tickets"
    return f"{program.geometry.num_q} x {program.geometry.num_kv} tiles a head"


def _lost(each: Simulation, machine: bool) -> tuple[float, float]:
    return each.bubble, each.blocked if machine else each.stall
