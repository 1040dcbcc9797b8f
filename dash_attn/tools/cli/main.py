"""dash-attn: parse, call, print. An error is one line on standard error, never a traceback.

The exit status is 2 for wrong arguments, 1 for a file that cannot be read, a package that is not installed or an answer
that is no, 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer

from dash_attn import __version__
from dash_attn.tools import missing_package
from dash_attn.tools.cli.app import FileProblem, app

# What typer raises for bad usage; its base class has moved between releases, its name under BadParameter has not.
UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]

# In the order of the help text. Each adds its commands to `app` when it is imported.
for _module in (
    "health",
    "explain",
    "simulate",
    "search",
    "verify",
    "draw",
    "bench",
    "audit",
    "trace",
    "calibrate",
    "watch",
):
    import_module(f"dash_attn.tools.cli.{_module}")


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    if version or context.invoked_subcommand is None:
        typer.echo(__version__ if version else context.get_help())
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run a command and leave the process with its exit status."""
    try:
        status = app(args=arguments, prog_name="dash-attn", standalone_mode=False)
    except typer.Exit as done:
        status = done.exit_code
    except (typer.Abort, KeyboardInterrupt):
        status = 130
    except UsageProblem as error:
        status = _fail(2, error.format_message())  # type: ignore[attr-defined]
    except FileProblem as error:
        status = _fail(1, str(error))
    except ImportError as error:
        status = _fail(1, missing_package(error))
    except (ValueError, NotImplementedError, OSError) as error:
        status = _fail(2, str(error))
    sys.exit(status if isinstance(status, int) else 0)


def _fail(status: int, message: str) -> int:
    line = " ".join(message.split())
    typer.echo(f"dash-attn: error: {line}", err=True)
    return status
