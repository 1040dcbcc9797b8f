"""dash-attn calibrate: the fitted model, and a line for every cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from dash_attn.tools.cli.app import Json, command, emit, reading, wrote
from dash_attn.tools.cli.tables import console, working

if TYPE_CHECKING:
    from dash_attn.tools.trace.calibrate import Calibration


@command("calibrate")
def calibrate_command(
    files: Annotated[list[Path], Argument(help="benchmark results (.json) and traces (.npz) of one GPU")],
    out: Annotated[Path | None, Option("--out", help="write the fitted model to this file, as JSON")] = None,
    as_json: Json = False,
) -> None:
    """Fit the machine model to measured times, and say how well it predicts and ranks."""
    from dash_attn.tools.trace.calibrate import calibrate, read_samples

    with working("fitting"):
        with reading(files):
            samples = read_samples(files)
        fit = calibrate(samples)
    if out is not None:
        out.write_text(json.dumps(fit.to_json(), indent=1) + "\n", encoding="utf-8")
    if as_json:
        emit(facts_of(fit))
        return
    print_calibration(fit)
    wrote([out])


def facts_of(fit: Calibration) -> dict[str, Any]:
    cells = [
        {
            "cell": cell.cell,
            "main_kernel_only": cell.main_only,
            "policies": {name: {"measured": us, "predicted": said} for name, us, said in cell.policies},
            "worst_error": cell.worst,
            "ranked": cell.ranked,
            "strictly_ranked": cell.strictly_ranked,
            "auto": cell.auto,
            "model_takes": cell.choice,
            "auto_behind_best": cell.auto_loss,
        }
        for cell in fit.cells
    ]
    counts = [
        {"predicted": part.predicted, "ranked": part.ranked, "strictly_ranked": part.strictly_ranked}
        for part in (fit.part(False), fit.part(True))
    ]
    return {"model": fit.to_json(), **counts[0], "main_kernel": counts[1], "cells": cells}


def print_calibration(fit: Calibration) -> None:
    for main_only, what in ((True, "the main kernel alone"), (False, "whole calls")):
        part = fit.part(main_only)
        if part.cells:
            console().print(table_of(part, f"{what}, us: measured and predicted"))
            console().print(f"{what}: {accuracy_of(part) if main_only else summary_of(part)}")
    for dim, call in fit.to_json().items():
        times = ", ".join(f"{name} {value:g}" for name, value in call["machine"].items())
        console().print(f"head dim {dim}: {times}; start {call['start']:g}, finish {call['finish']:g}")


def table_of(fit: Calibration, title: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("cell", "policies, fastest first: measured (error of the prediction)"):
        table.add_column(name)
    for name in ("worst", "ranks", "auto"):
        table.add_column(name, justify="right")
    for cell in fit.cells:
        by_time = sorted(cell.policies, key=lambda row: row[1])
        loss = cell.auto_loss
        table.add_row(
            cell.cell,
            "  ".join(f"{name} {us:.0f} ({said / us - 1:+.1%})" for name, us, said in by_time),
            f"{cell.worst:+.1%}",
            "as measured" if cell.ranked else "[yellow]not[/]",
            "" if loss is None else f"+{loss:.1%}",
        )
    return table


def accuracy_of(fit: Calibration) -> str:
    from dash_attn.tools.trace.calibrate import WITHIN

    errors = [c.auto_error for c in fit.cells if c.auto_error is not None]
    return (
        f"within {WITHIN:.0%}: every policy in {fit.predicted} of {len(fit.cells)} cells, the one auto takes in "
        f"{sum(abs(error) <= WITHIN for error in errors)} of {len(errors)}"
    )


def summary_of(fit: Calibration) -> str:
    """Of whole calls, which are timed well enough to say who is ahead."""
    from dash_attn.tools.trace.calibrate import LEVEL

    losses = [c.auto_loss for c in fit.cells if c.auto_loss is not None]
    several = sum(len(c.policies) > 1 for c in fit.cells)
    return (
        f"{accuracy_of(fit)}; policies more than {LEVEL:.0%} apart ranked as measured in {fit.ranked} of {several} "
        f"({fit.strictly_ranked} if no prediction may be level); "
        f"auto within {LEVEL:.0%} of the best measured in {sum(loss <= LEVEL for loss in losses)} of {len(losses)}, "
        f"and what the model would take in {sum(c.choice == c.auto for c in fit.cells)}"
    )
