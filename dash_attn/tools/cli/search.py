"""dash-attn search: the search heuristic beside every policy, and the exact solver where asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from dash_attn.launch import compose
from dash_attn.order import applicable
from dash_attn.program import Program, save
from dash_attn.simulate import Paper
from dash_attn.tiling import Tiling
from dash_attn.tools.cli.app import Json, command, emit, wrote
from dash_attn.tools.cli.tables import TableRow, console, policy_rows, policy_table, simulation_row, working
from dash_attn.tools.cli.workload import (
    COMPUTE,
    REDUCE,
    RUN,
    ProblemOptions,
    TileOptions,
    WorkersOption,
    Workload,
    check_times,
)
from dash_attn.verify import verify


@dataclass(frozen=True)
class SolverOptions:
    """The times of the paper's model: whole numbers by default, which the exact solver needs. And how long to solve."""

    compute: Annotated[float, Option("--compute", help=f"{COMPUTE}; with --exact a whole number")] = 4
    reduce: Annotated[float, Option("--reduce", help=f"{REDUCE}; with --exact a whole number")] = 1
    exact: Annotated[bool, Option("--exact", help="prove the optimum of a small problem")] = False
    seconds: Annotated[float, Option("--seconds", help="time limit of --exact")] = 30.0

    def model(self) -> Paper:
        check_times(self.compute, self.reduce)
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"--seconds must be a number above 0, got {self.seconds:g}")
        return Paper(self.compute, self.reduce)


@command("search")
def search(
    problem: ProblemOptions,
    tiles: TileOptions,
    solver: SolverOptions,
    workers: WorkersOption = None,
    save_to: Annotated[Path | None, Option("--save", help=f"write the best program to this file; {RUN}")] = None,
    as_json: Json = False,
) -> None:
    """Compare the policy search with all others. With --exact, find and prove the best order of a small problem."""
    workload = Workload(problem, tiles)
    count, tiling = workload.workers(workers), workload.tiling()
    rows, best = search_rows(tiling, count, solver.model(), solver.seconds if solver.exact else None)
    if save_to is not None:
        save(best, save_to)
    if as_json:
        emit(rows)
        return
    size = f"{problem.heads} heads, {count} workers, paper model"
    console().print(policy_table(rows, f"{tiling.problem.mask} mask, {size}"))
    for row in rows:
        if "optimal" in row:
            typer.echo(verdict(row))
    wrote([save_to])


def verdict(row: TableRow) -> str:
    """What the exact solver proved."""
    makespan, bound = row["makespan"], row["proved_bound"]
    said = "is optimal" if row["optimal"] else f"is within {makespan / bound - 1:.1%} of the optimum"
    return f"{row['policy']}: {makespan:g} {said} (proved: no order is below {bound:g})"


def search_rows(tiling: Tiling, workers: int, model: Paper, seconds: float | None) -> tuple[list[TableRow], Program]:
    """A row for every order that applies (and for the exact one), and the program with the smallest makespan."""
    programs = [verify(compose(tiling, name)) for name in applicable(tiling)]
    rows, results = policy_rows(programs, workers, model)
    candidates = [(result.makespan, result.program) for result in results if isinstance(result.program, Program)]
    if seconds is not None:
        row, program = _exact(tiling, workers, model, seconds)
        rows.append(row)
        candidates.append((row["makespan"], program))
    if not candidates:
        raise ValueError(f"no policy can run this on {workers} workers: give more --workers")
    return rows, min(candidates, key=lambda candidate: candidate[0])[1]


def _exact(tiling: Tiling, workers: int, model: Paper, seconds: float) -> tuple[TableRow, Program]:
    from dash_attn.tools.exact import solve

    with working("solving") as status:

        def progress(best: float, bound: float) -> None:
            status.update(f"solving: best so far {best:g}, none below {bound:g}")

        result = solve(tiling, workers, model, seconds=seconds, progress=progress)
    row = simulation_row(result.simulation, result.placed.co_resident)
    return {**row, "optimal": result.optimal, "proved_bound": result.bound}, result.program
