"""What `dash-attn search` does: the heuristic beside every policy, and the exact solver where asked."""

from __future__ import annotations

from typing import Any

from dash_attn.order import applicable, schedule
from dash_attn.program import Program, build
from dash_attn.simulate import Paper, simulate
from dash_attn.tiling import Tiling
from dash_attn.tools.cli.tables import Row, policy_rows, simulation_row, working
from dash_attn.verify import verify


def search_rows(tiling: Tiling, workers: int, model: Paper, seconds: float | None) -> tuple[list[Row], Program]:
    """A row for every order that applies (and for the exact one), and the program with the smallest makespan."""
    programs = [build(schedule(tiling, name)) for name in applicable(tiling)]
    rows = policy_rows(programs, workers, model)
    if seconds is not None:
        row, program = _exact(tiling, workers, model, seconds)
        rows.append(row)
        programs.append(program)
    able = [(row["makespan"], i) for i, row in enumerate(rows) if "makespan" in row]
    if not able:
        raise ValueError(f"no policy can run this on {workers} workers: give more --workers")
    return rows, programs[min(able)[1]]


def _exact(tiling: Tiling, workers: int, model: Paper, seconds: float) -> tuple[Row, Program]:
    from dash_attn.tools.exact import exact

    with working("solving") as status:

        def progress(best: float, bound: float) -> None:
            status.update(f"solving: best so far {best:g}, none below {bound:g}")

        found = exact(tiling, workers, int(model.compute), int(model.reduce), seconds=seconds, progress=progress)
    program = build(found.schedule)
    result = simulate(program, workers, model, record=False)
    row: dict[str, Any] = simulation_row(result, verify(program, workers).co_resident)
    return {**row, "optimal": found.optimal, "proved_bound": found.bound}, program
