"""dash-attn bench and audit. Their options are read by argparse in tools/bench."""

from __future__ import annotations

import typer

from dash_attn.tools.cli.app import app

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("bench", add_help_option=False, context_settings=PASSED_ON)
def bench(context: typer.Context) -> None:
    """Time the backward beside its peers: the paper's figures and tables."""
    from dash_attn.tools.bench.command import main as run

    raise typer.Exit(run(context.args))


@app.command("audit", add_help_option=False, context_settings=PASSED_ON)
def audit(context: typer.Context) -> None:
    """Repeat a backward under stress and compare every bit."""
    from dash_attn.tools.bench.audit.command import main as run

    raise typer.Exit(run(context.args))
