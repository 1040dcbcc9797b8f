"""dash-attn explain: what a call would run, as `dash_attn.explain` says it, and how long the model thinks it takes."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

from typer import Context, Option

from dash_attn.pack import Pack
from dash_attn.simulate import H200_SMS, Paper, Tickets, lower_bounds
from dash_attn.tools.cli.app import Json, command, emit
from dash_attn.tools.cli.tables import console, fact_table, simulated, working
from dash_attn.tools.cli.workload import (
    CPU_WORKERS,
    WORKERS,
    PolicyOption,
    ProblemOptions,
    backend_named,
    check_workers,
    h200_of,
)
from dash_attn.verify import require_workers

DRAWN_TASKS = 20_000  # of a program whose critical path is looked for: the graph has a node a phase


@command("explain", seqlen=4096, heads=16)
def explain(
    context: Context,
    problem: ProblemOptions,
    policy: PolicyOption = "auto",
    workers: Annotated[
        int | None,
        Option("--workers", help=f"{WORKERS} [default: the GPU's SMs, {H200_SMS} without one, {CPU_WORKERS}]"),
    ] = None,
    panels: Annotated[
        int, Option("--panels", help="ranges of equal length that the queries are cut into, as context parallel does")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Say what would run for a problem: backend, tile, order, fingerprint, memory, time in the model."""
    check_workers(workers)
    problem = problem.given(context)
    with working("planning and simulating"):
        facts = explained(problem, policy, workers, panels)
    if as_json:
        emit(facts)
        return
    title = f"{problem.batch} x {problem.seqlen} tokens, {problem.heads} heads, head dim {problem.head_dim}"
    console().print(fact_table({name: brief(value) for name, value in facts.items()}, title))


def brief(value: Any) -> object:
    """A fact for people: few digits, the ends of a long list."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {brief(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join([*value[:3], "...", *value[-1:]] if len(value) > 4 else value)
    return value


def explained(options: ProblemOptions, policy: str, workers: int | None, panels: int) -> dict[str, Any]:
    """The fields of `dash_attn.explain`, the size of the program, and on Hopper the model's time."""
    from dash_attn.api.explain import explanation
    from dash_attn.backends import Options
    from dash_attn.prepare import prepare
    from dash_attn.tools.cli.absent import UNKNOWN

    problem, backend = replace(options.problem(), panels=panels), backend_named(options.backend)
    prepared = prepare(problem, policy, Options(), backend)
    said = explanation(prepared)
    if UNKNOWN in (said.forward, said.software):
        said = replace(said, identity=UNKNOWN)
    planned, count = prepared.plan, workers or said.workers
    facts = asdict(said) | {"workers": count}
    if isinstance(planned, Pack) and backend.name != "sm90":
        # The CPU runs the documents one after the other, without tickets.
        require_workers(said.policy, said.co_resident, count)
        return facts
    work = Tickets.of(planned) if isinstance(planned, Pack) else planned.verified
    result, _ = simulated(work, count, h200_of(problem) if backend.name == "sm90" else Paper(), record=False)
    program, board = result.program, result.board
    facts |= {"chains": len(board.chains), "runs": len(board.runs)}
    facts |= {"tickets": program.num_tickets} if isinstance(program, Tickets) else {"program_bytes": program.nbytes}
    if backend.name == "sm90":
        facts |= {"makespan_us": result.makespan, "gap": result.gap}
        facts["lower_bounds_us"] = lower_bounds(program, count, result.model)
    if board.num_tasks <= DRAWN_TASKS:
        from dash_attn.tools.dag import dag, depth_monotone

        facts["keeps_critical_path"] = depth_monotone(program)
        path = dag(program, result.placement, Paper()).critical_path()
        facts["critical_path"] = [str(phase) for phase in path]
    return facts
