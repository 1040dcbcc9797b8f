"""The commands `dash-attn demo` and `dash-attn doctor`, and their options."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from dash_attn.tools.cli.app import Json, command, emit


@command("demo")
def demo(
    out: Annotated[Path, Option("--out", help="report to write")] = Path("report.html"),
    quick: Annotated[bool, Option("--quick", help="run a smaller problem")] = False,
) -> None:
    """Run attention forward and backward with every policy, check the results, and write a report."""
    from dash_attn.tools.cli.demo import run_demo

    run_demo(out, quick)


@command("doctor")
def doctor(
    seconds: Annotated[float, Option("--seconds", help="time for the self-test")] = 10.0,
    as_json: Json = False,
) -> None:
    """Say what runs on this machine, test that it repeats its bits, and say why a run may still differ.

    The exit status is 1 if the self-test fails.
    """
    from dash_attn.tools.cli.doctor import as_rows, failed, run_doctor, show

    with redirect_stdout(sys.stderr):  # compilers and libraries may print; standard output is for the answer
        findings = run_doctor(seconds)
    if as_json:
        emit(as_rows(findings))
    else:
        show(findings)
    if failed(findings):
        raise typer.Exit(1)
