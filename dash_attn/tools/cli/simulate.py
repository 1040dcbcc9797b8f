"""dash-attn simulate and compare: orders in a model of time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from typer import Option

from dash_attn.program import save
from dash_attn.simulate import Simulation, Tickets
from dash_attn.tools.cli.app import Json, command, emit, wrote
from dash_attn.tools.cli.scale import RankOptions, rank_table
from dash_attn.tools.cli.tables import (
    console,
    fact_table,
    policy_rows,
    policy_table,
    simulated,
    simulation_row,
    working,
)
from dash_attn.tools.cli.workload import (
    RUN,
    ModelOptions,
    PoliciesOption,
    PolicyOption,
    ProblemOptions,
    TileOptions,
    Workload,
    parse_names,
)


@dataclass(frozen=True)
class OutputOptions:
    """What to write of one simulation."""

    save: Annotated[Path | None, Option("--save", help=f"write the program to this file; {RUN}")] = None
    gantt: Annotated[Path | None, Option("--gantt", help="draw the timeline: a .png or .svg file")] = None
    html: Annotated[Path | None, Option("--html", help="draw the timeline: an interactive page")] = None
    perfetto: Annotated[Path | None, Option("--perfetto", help="write a trace for ui.perfetto.dev")] = None
    as_json: Json = False

    def draw(self, result: Simulation) -> None:
        from dash_attn.tools import viz  # matplotlib takes a second to import

        colour: viz.ColourBy = "sequence" if isinstance(result.program, Tickets) else "q"
        if self.gantt is not None:
            viz.gantt(result, self.gantt, colour=colour)
        if self.html is not None:
            viz.html([result], self.html, colour=colour)
        if self.perfetto is not None:
            viz.perfetto(result, self.perfetto)


@command("simulate")
def simulate_command(
    problem: ProblemOptions,
    tiles: TileOptions,
    model: ModelOptions,
    out: OutputOptions,
    ranks: RankOptions,
    policy: PolicyOption = "auto",
) -> None:
    """Run one order in a model of time: makespan, lower bound, bubbles, stalls.

    With --ranks: the time of one sequence on many GPUs, with its exposed communication, bytes sent and memory.
    """
    if ranks != RankOptions():
        others = (tiles, model, replace(out, as_json=False), policy)
        if others != (TileOptions(), ModelOptions(), OutputOptions(), "auto"):
            raise ValueError("--ranks, --mode and --layout go with the options of a problem and --json, and no others")
        on_ranks(problem, ranks, out.as_json)
        return
    workload = Workload(problem, tiles)
    count, chosen = workload.workers(model.workers), workload.model(model)
    drawn = any((out.gantt, out.html, out.perfetto))
    with working("planning and simulating"):
        result, needed = simulated(workload.work(policy), count, chosen, record=drawn)
        program, row = result.program, simulation_row(result, needed)
    if out.save is not None:
        if isinstance(program, Tickets):
            raise ValueError("--save writes one program, and a pack has one for each length of its documents")
        save(program, out.save)
    if drawn:
        out.draw(result)
    if out.as_json:
        emit(row)
        return
    console().print(fact_table(row, f"{program.policy} on {program.mask}, {result.model.name} model"))
    wrote([out.save, out.gantt, out.html, out.perfetto])


def on_ranks(problem: ProblemOptions, ranks: RankOptions, as_json: bool) -> None:
    from dash_attn.backends.sm90.backend import config_of  # torch takes seconds to import

    whole = problem.problem()
    if problem.backend != "sm90":
        raise ValueError(f"--ranks --backend {problem.backend}: the prediction is for Hopper GPUs: leave --backend out")
    config_of(whole)  # a problem that GPUs refuse has no time there
    with working("predicting"):
        rows = ranks.predicted(whole)
    if as_json:
        emit(rows)
    else:
        console().print(rank_table(rows, whole))


@command("compare", heads=4)
def compare(
    problem: ProblemOptions,
    tiles: TileOptions,
    model: ModelOptions,
    policy: PoliciesOption = None,
    html: Annotated[Path | None, Option("--html", help="draw every timeline: an interactive page")] = None,
    as_json: Json = False,
) -> None:
    """Run several orders in a model of time, side by side."""
    workload = Workload(problem, tiles)
    count, chosen = workload.workers(model.workers), workload.model(model)
    with working("planning and simulating"):
        names = workload.policies() if policy is None else parse_names("--policy", policy)
        programs = [workload.work(name) for name in names]
        rows, results = policy_rows(programs, count, chosen, record=html is not None)
    if html is not None:
        from dash_attn.tools import viz

        packed = any(isinstance(each, Tickets) for each in programs)
        viz.html(results, html, colour="sequence" if packed else "q")
    if as_json:
        emit(rows)
        return
    size = f"{problem.heads} heads, {count} workers, {chosen.name} model"
    first = programs[0]
    mask = first.mask if isinstance(first, Tickets) else first.program.mask
    console().print(policy_table(rows, f"{mask} mask, {size}"))
    wrote([html])
