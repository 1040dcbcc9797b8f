"""What `dash-attn search` does: the heuristic beside every policy, and the exact solver where asked."""

from __future__ import annotations

from dash_attn.launch import compose
from dash_attn.order import applicable
from dash_attn.program import Program
from dash_attn.simulate import Paper
from dash_attn.tiling import Tiling
from dash_attn.tools.cli.tables import Row, policy_rows, simulation_row, working
from dash_attn.verify import verify


def search_rows(tiling: Tiling, workers: int, model: Paper, seconds: float | None) -> tuple[list[Row], Program]:
    """A row for every order that applies (and for the exact one), and the program with the smallest makespan."""
    programs = [verify(compose(tiling, name)) for name in applicable(tiling)]
    rows, results = policy_rows(programs, workers, model)
    candidates = [(result.makespan, result.program) for result in results]
    if seconds is not None:
        row, program = _exact(tiling, workers, model, seconds)
        rows.append(row)
        candidates.append((row["makespan"], program))
    if not candidates:
        raise ValueError(f"no policy can run this on {workers} workers: give more --workers")
    return rows, min(candidates, key=lambda candidate: candidate[0])[1]


def _exact(tiling: Tiling, workers: int, model: Paper, seconds: float) -> tuple[Row, Program]:
    from dash_attn.tools.exact import solve

    with working("solving") as status:

        def progress(best: float, bound: float) -> None:
            status.update(f"solving: best so far {best:g}, none below {bound:g}")

        result = solve(tiling, workers, model, seconds=seconds, progress=progress)
    row = simulation_row(result.simulation, result.placed.co_resident)
    return {**row, "optimal": result.optimal, "proved_bound": result.bound}, result.program
