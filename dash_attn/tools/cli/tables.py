"""Results as rows, rows as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

from dash_attn.simulate import Simulation, Tickets, simulate
from dash_attn.simulate.models import Model
from dash_attn.verify import TooFewWorkers, Verified

TableRow = dict[str, Any]


def simulation_row(result: Simulation, co_resident: int) -> TableRow:
    """What `simulate --json` prints."""
    program = result.program
    return {
        "policy": program.policy,
        "mask": program.mask,
        "model": result.model.name,
        "unit": result.model.unit,
        "workers": result.workers,
        "tasks": result.board.num_tasks,
        "chains": len(result.board.chains),
        "makespan": result.makespan,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "busy": result.busy,
        "stall": result.stall,
        "blocked": result.blocked,
        "bubble": result.bubble,
        "utilisation": result.utilisation,
        "co_resident": co_resident,
        "fingerprint": program.fingerprint,
    }


def simulated(work: Verified | Tickets, workers: int, model: Model, *, record: bool) -> tuple[Simulation, int]:
    """A program on its placement, or the tickets of a pack, in a model of time; and how many workers it needs."""
    if isinstance(work, Tickets):
        return simulate(work, workers, model, record=record), work.co_resident
    placed = work.on(workers)
    return simulate(placed.program, workers, model, placement=placed.placement, record=record), placed.co_resident


def policy_rows(
    programs: Iterable[Verified | Tickets], workers: int, model: Model, *, record: bool = False
) -> tuple[list[TableRow], list[Simulation]]:
    """Place and simulate each program once: a row each, and the simulations of those that can run.

    The row of a program that needs more workers says so and has no numbers.
    """
    rows: list[TableRow] = []
    results: list[Simulation] = []
    for work in programs:
        program = work if isinstance(work, Tickets) else work.program
        try:
            result, needed = simulated(work, workers, model, record=record)
        except TooFewWorkers as error:
            rows.append({"policy": program.policy, "fingerprint": program.fingerprint, "error": str(error)})
            continue
        results.append(result)
        rows.append(simulation_row(result, needed))
    baseline = next((row["makespan"] for row in rows if row["policy"] == "fa3" and "makespan" in row), None)
    for row in rows:
        if baseline and row.get("makespan"):
            row["speedup"] = baseline / row["makespan"]
    return rows, results


def policy_table(rows: list[TableRow], title: str) -> Table:
    """The table of policies."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("policy")
    # Beside the workers, writers wait in parallel: of the machine's time only what blocks a worker is lost.
    waiting = "blocked" if any(row.get("model") == "machine" for row in rows) else "stall"
    for name in ("makespan", "bubble", waiting, "above bound", "vs fa3", "needs"):
        table.add_column(name, justify="right")
    table.add_column("fingerprint")
    best = min((row["makespan"] for row in rows if "makespan" in row), default=0.0)
    for row in rows:
        if "error" in row:
            table.add_row(row["policy"], f"[yellow]{row['error']}[/]", *[""] * 5, row["fingerprint"])
            continue
        share = row["workers"] * row["makespan"] or 1.0
        table.add_row(
            f"[bold green]{row['policy']}[/]" if row["makespan"] <= best * (1 + 1e-12) else row["policy"],
            f"{row['makespan']:.6g}",
            f"{row['bubble'] / share:.1%}",
            f"{row[waiting] / share:.1%}",
            f"{row['gap']:.1%}",
            f"{row['speedup']:.2f}x" if "speedup" in row else "",
            f"{row['co_resident']}",
            row["fingerprint"],
        )
    return table


def fact_table(facts: Mapping[str, object], title: str) -> Table:
    """Name and value, line by line."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table


def working(what: str) -> Status:
    """A spinner on standard error while something takes its time; nothing where that is no terminal."""
    return Console(stderr=True).status(what)


def console() -> Console:
    """Standard output, wide enough for every table when it is no terminal."""
    return Console(width=None if Console().is_terminal else 140)
