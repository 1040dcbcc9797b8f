"""The application, and the one way in which a command is added to it."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from dash_attn.tools.bench.json_text import from_json, to_json

Command = Callable[..., None]
WORDS: dict[Any, str] = {int: "N", float: "X", str: "NAME", Path: "FILE"}

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Deterministic attention for training: orders as data, verified, simulated, drawn, run.",
)

Json = Annotated[bool, typer.Option("--json", help="print one JSON value on standard output")]


class Worded(TyperCommand):
    """In its help texts an argument is its word alone: typer adds the Python type."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]


class FileProblem(Exception):
    """A file that cannot be read or does not hold what it should: exit status 1."""


def command(
    name: str, *, settings: dict[str, Any] | None = None, without: Sequence[str] = (), **defaults: object
) -> Callable[[Command], Command]:
    """Add a command. A parameter whose type is a dataclass stands for one option a field, so that commands share the
    definition of their options. `defaults` replaces the default of an option for this command. The command has no
    options for the fields `without`: these fields keep their defaults. `settings` are those of typer's context."""

    def register(function: Command) -> Command:
        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
        options: list[Parameter] = []
        for parameter in signature(function).parameters.values():
            if parameter.name in groups:
                options += [option for option in _options(groups[parameter.name]) if option.name not in without]
            else:
                options.append(_option(parameter.name, hints[parameter.name], parameter.default))
        assert defaults.keys() <= {option.name for option in options}, f"{name} has no option for some of {defaults}"

        def call(**given: Any) -> None:
            for group, kind in groups.items():
                given[group] = kind(
                    **{field.name: given.pop(field.name) for field in fields(kind) if field.name in given}
                )
            function(**given)

        chosen = [option.replace(default=defaults.get(option.name, option.default)) for option in options]
        call.__signature__ = Signature(chosen)  # type: ignore[attr-defined]
        call.__annotations__ = {option.name: option.annotation for option in chosen}
        call.__doc__ = function.__doc__
        # A short help that is given is not cut to the width of the terminal.
        short = (function.__doc__ or "").partition("\n")[0]
        app.command(name, cls=Worded, short_help=short, context_settings=settings)(call)
        return function

    return register


def _options(kind: Any) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [_option(field.name, hints[field.name], _default(field)) for field in fields(kind)]


def _option(name: str, hint: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=_worded(hint), default=default)


def _worded(hint: Any) -> Any:
    """With a word for the value in help texts, where the option has none of its own."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, option = get_args(hint)
    words = [WORDS[each] for each in (kind, *get_args(kind)) if each in WORDS]
    if not words or option.metavar is not None:
        return hint
    option = copy(option)
    option.metavar = words[0]
    return Annotated[kind, option]


def _default(field: Field[Any]) -> Any:
    return Parameter.empty if field.default is MISSING else field.default


def given_options(context: typer.Context, names: Sequence[str]) -> list[str]:
    """The options of these names that the command line gives, also where it gives their defaults."""
    sources = {
        option.opts[0]: context.get_parameter_source(option.name or "")
        for option in context.command.params
        if option.name in names
    }
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def emit(value: Any) -> None:
    """Print a value for programs."""
    typer.echo(to_json(value))


def wrote(paths: Sequence[Path | None]) -> None:
    """Name the files that were written."""
    for path in paths:
        if path is not None:
            typer.echo(f"wrote {path}")


def earlier_value(path: Path | None, add: bool) -> dict[str, Any] | None:
    """What a file holds to which --add adds, or None if there is nothing."""
    if not add or path is None or not path.is_file():
        return None
    with reading([path]):
        return dict(from_json(path.read_text(encoding="utf-8")))


@contextmanager
def reading(paths: Sequence[Path]) -> Iterator[None]:
    """Around the reading of files: a missing one is a wrong argument, a broken one a FileProblem."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"no such file: {path}")
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OSError, zipfile.BadZipFile, zlib.error) as error:
        named = ", ".join(map(str, paths))
        text = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__} {error}"
        raise FileProblem(text if named in text else f"{named}: cannot be read: {text}") from error
