"""dash-attn verify: may this program run?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dash_attn.program import load
from dash_attn.tools.cli.app import Json, command, emit
from dash_attn.tools.cli.tables import working
from dash_attn.tools.cli.workload import WORKERS, check_workers
from dash_attn.verify import VerifyError, verify


@command("verify")
def verify_command(
    file: Annotated[Path, typer.Argument(help="a program, as --save writes it")],
    workers: Annotated[
        int | None, typer.Option("--workers", help=f"{WORKERS} [default: as many as the program needs]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a program: exit 0 if it may run, exit 1 with the reason if not.

    dash_attn.attention(q, k, v, policy=dash_attn.load(FILE)) runs it.
    """
    check_workers(workers)
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    try:
        with working("verifying"):
            program = load(file)
            verified = verify(program)
            if workers is not None:
                verified.on(workers)
    except ValueError as error:
        if as_json:
            tasks = [str(task) for task in error.tasks] if isinstance(error, VerifyError) else []
            emit({"ok": False, "reason": str(error), "tasks": tasks})
        else:
            typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(1) from None
    facts = {
        "ok": True,
        "policy": program.policy,
        "mask": program.mask,
        "tasks": program.num_tasks,
        "chains": len(program.chains),
        "co_resident": verified.co_resident,
        "fingerprint": program.fingerprint,
    }
    if as_json:
        emit(facts)
    else:
        on = "" if workers is None else f" on {workers} workers"
        typer.echo(f"ok: {program.num_tasks} tasks, needs {verified.co_resident} co-resident workers, may run{on}")
