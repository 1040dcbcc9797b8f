"""dash-attn watch and diff: record a training script, and find the first operation in which two records differ."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from dash_attn.tools.cli.app import FileProblem, Json, command, emit, wrote

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from dash_attn.watching.causes import Cause
    from dash_attn.watching.difference import Difference
    from dash_attn.watching.files import Record
    from dash_attn.watching.scope import Scope
    from dash_attn.watching.watcher import Watcher


@dataclass(frozen=True)
class RecordOptions:
    """What to record of a run."""

    steps: Annotated[
        str, Option("--steps", metavar="RANGE", help="steps to record: FIRST:END or FIRST:END:EVERY; : means all")
    ] = ":"
    depth: Annotated[
        int | None, Option("--depth", help="depth of modules to record: 2 is as deep as blocks.0 [default: all]")
    ] = None
    share: Annotated[
        float | None,
        Option("--share", help="part to read of what layers compute: 1, 0.25 or another 1/n [default: 1/16]"),
    ] = None
    first_step: Annotated[
        int, Option("--first-step", help="number of the first step, for a script that goes on from a checkpoint")
    ] = 0

    def scope(self) -> Scope:
        from dash_attn.watching.scope import SHARE, Scope

        return Scope(steps_of(self.steps), self.depth, SHARE if self.share is None else self.share, self.first_step)


@command("watch", settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def watch_command(
    script: Annotated[Path, Argument(metavar="SCRIPT", help="a training script")],
    record: RecordOptions,
    arguments: Annotated[list[str] | None, Argument(metavar="ARGUMENT", help="arguments of the script")] = None,
    to: Annotated[Path, Option("--to", metavar="FOLDER", help="folder to write the record to")] = Path("watched"),
) -> None:
    """Run a training script and record a fingerprint of every tensor of every step, for diff."""
    if not script.is_file():
        raise ValueError(f"no such file: {script}")
    scripted, before = Scripted(to, record.scope()), (sys.argv, sys.path[0])
    sys.argv, sys.path[0] = [str(script), *(arguments or [])], str(script.resolve().parent)
    left: SystemExit | None = None
    try:
        with scripted:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:  # many scripts end so
        left = error
    except Exception:
        traceback.print_exc()  # of the script: the user's error, not one of this command
        raise typer.Exit(1) from None
    finally:
        sys.argv, sys.path[0] = before
    if scripted.is_here:
        told = scripted.outcome(script)
        if not scripted.recorded and (left is None or left.code in (None, 0)):
            raise ValueError(told)
        typer.echo(told, err=True)
    if left is not None:
        raise left


NOT_WATCHED = "processes that the script starts are not recorded; call dash_attn.watch in them"


def steps_of(text: str) -> range:
    parts = text.split(":")
    try:
        first, end, every = [int(part) if part else None for part in (*parts, "")[:3]]
        steps = range(first or 0, 2**32 if end is None else end, 1 if every is None else every)
    except ValueError:
        steps = range(0)
    if len(parts) > 3 or not steps or steps.start < 0 or steps.step < 1:
        raise ValueError(f"--steps {text!r}: not FIRST:END or FIRST:END:EVERY")
    return steps


class Scripted:
    """While a script runs, its first model is watched: the largest one that holds the parameters of an optimizer. In a
    forked process nothing is."""

    def __init__(self, to: Path, scope: Scope) -> None:
        self.to, self.scope = to, scope
        self.watcher: Watcher | None = None
        self._process, self._told = os.getpid(), False

    @property
    def is_here(self) -> bool:
        """Is this the process of the command?"""
        return os.getpid() == self._process

    @property
    def recorded(self) -> bool:
        """Is a step in the record?"""
        return self.watcher is not None and self.watcher.has_written

    def outcome(self, script: Path) -> str:
        """In one line, after the script."""
        if self.recorded:
            return f"recorded in {self.to}"
        why = "made no optimizer for a model" if self.watcher is None else "ran no step to record"
        return f"nothing was recorded: {script} {why} in this process; {NOT_WATCHED}"

    def __enter__(self) -> Scripted:
        from torch.optim import Optimizer

        self._init = original = Optimizer.__init__

        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._made(optimizer)

        Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: object) -> None:
        from torch.optim import Optimizer

        Optimizer.__init__ = self._init  # type: ignore[method-assign]
        if self.watcher is not None:
            self.watcher.close()

    def _made(self, optimizer: Optimizer) -> None:
        from dash_attn.watching.watcher import watch

        if not self.is_here:
            if not self._told:
                typer.echo(f"dash-attn watch: {NOT_WATCHED}", err=True)
            self._told = True
        elif self.watcher is not None and self.watcher.trains(optimizer):
            self.watcher.add_optimizer(optimizer)
        elif self.watcher is not None:
            typer.echo("dash-attn watch: only the first model is recorded; call dash_attn.watch for others", err=True)
        elif (model := owner(optimizer)) is not None:
            self.watcher = watch(model, optimizer=optimizer, to=self.to, **vars(self.scope))


def owner(optimizer: Optimizer) -> nn.Module | None:
    """The module with the most modules in it, of those that hold a parameter of the optimizer."""
    from torch import nn

    from dash_attn.watching.tensors import parameters_of

    wanted = {id(parameter) for parameter in parameters_of(optimizer)}
    modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    holding = [module for module in modules if any(id(p) in wanted for p in module.parameters())]
    return max(holding, key=lambda module: sum(1 for _ in module.modules()), default=None)


@dataclass(frozen=True)
class Compared:
    """Two runs, their first difference and its causes."""

    a: list[Record]
    b: list[Record]
    difference: Difference | None
    causes: list[Cause]

    @property
    def steps(self) -> int:
        from dash_attn.watching.difference import common_steps

        return min(len(common_steps(*pair)) for pair in zip(self.a, self.b, strict=True))

    @property
    def share(self) -> str:
        """The share that was read of some tensor, or 1 if all were read whole."""
        parts = any(not step.is_whole(row) for record in self.a for step in record.steps.values() for row in step.rows)
        return self.a[0].share if parts else "1"

    def facts(self) -> dict[str, Any]:
        first = self.difference
        if first is None:
            return {"same": True, "steps": self.steps, "ranks": len(self.a), "share": self.share}
        return {
            "same": False,
            "steps": self.steps,
            "ranks": len(self.a),
            "rank": first.rank,
            "step": first.step,
            "direction": first.direction,
            "module": first.row.module,
            "tensor": first.tensor,
            "form": first.form,
            "other_form": first.other_form,
            "operation": first.operation,
            "equal_inputs": list(first.inputs),
            "settings": list(first.settings),
            "steps_equal": first.steps_equal,
            "share": first.share,
            "topic": first.topic,
            "causes": [asdict(cause) for cause in self.causes],
        }


@command("diff")
def diff_command(
    a: Annotated[Path, Argument(metavar="A", help="the record of a run: a folder that watch wrote, or one file of it")],
    b: Annotated[Path, Argument(metavar="B", help="the record of another run")],
    picture: Annotated[
        Path | None, Option("--map", help="draw which modules differ in which step, to this file (.png)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Name the first operation in which two recorded runs differ: exit 0 if none does, exit 1 if one does."""
    runs = compared(a, b)
    if picture is not None:
        draw(runs, picture)
    if as_json:
        emit(runs.facts())
    else:
        tell(runs)
        wrote([picture])
    if runs.difference is not None:
        raise typer.Exit(1)


def compared(a: Path, b: Path) -> Compared:
    from dash_attn.watching.causes import causes
    from dash_attn.watching.difference import common_steps, first_difference
    from dash_attn.watching.files import load_run

    for path in (a, b):
        if not path.exists():
            raise ValueError(f"no such file or folder: {path}")
    try:
        one, two = load_run(a), load_run(b)
        difference = first_difference(one, two)
        if not all(common_steps(*pair) for pair in zip(one, two, strict=True)):
            raise ValueError(f"{a} and {b} have no step in common")
    except ValueError as error:
        raise FileProblem(str(error)) from error
    reasons = [] if difference is None else causes(difference, one[0].environment, two[0].environment)
    return Compared(one, two, difference, reasons)


def tell(runs: Compared) -> None:
    """The comparison for people."""
    first = runs.difference
    unequal = [len(pair[0].steps) != len(pair[1].steps) for pair in zip(runs.a, runs.b, strict=True)]
    beyond = ", which both runs have" if any(unequal) else ""
    if first is None:
        rows = sum(len(step.rows) for record in runs.a for step in record.steps.values())
        typer.echo(f"no difference in {counted(runs.steps)}{beyond} ({rows} fingerprints in the first run)")
        if runs.share != "1":
            typer.echo(f"A step read {runs.share} of each large tensor that a layer of torch.nn computes.")
        return
    rank = f" of rank {first.rank}" if len(runs.a) > 1 else ""
    kind = runs.a[0].environment.get("modules", {}).get(first.row.module)
    where = f" of {first.row.module}{f' ({kind})' if kind else ''}" if first.row.module else ""
    before = "It is the first step of the records."
    if first.steps_equal:
        before = f"{counted(first.steps_equal)} before it {'is' if first.steps_equal == 1 else 'are'} equal."
    lines = [
        f"The first difference is in step {first.step}{rank}. {before}",
        "",
        f"  first difference  {first.tensor}{where}: {first.form}",
        f"  direction         {first.direction}",
        f"  made by           {first.operation}",
    ]
    if first.other_form not in ("", first.form):
        lines.insert(3, f"  in the other run  {first.other_form}")
    if first.inputs:
        read = "" if first.is_sure else " in the part that was read"
        lines.append(f"  its inputs        equal{read}: {', '.join(first.inputs)}")
    if first.settings:
        more = f", and {len(first.settings) - 3} more" if len(first.settings) > 3 else ""
        lines.append(f"  its settings      differ: {', '.join(first.settings[:3])}{more}")
    elif first.inputs and first.topic != "gradient":
        drawn = ", or the random numbers that it draws" if first.generators else ""
        lines.append(
            f"                    So the operation itself differs{drawn}{'' if first.is_sure else ', most likely'}."
        )
    if not first.is_sure:
        again = first.to_be_sure
        lines += [
            f"  to be sure        A step read {first.share} of each large tensor that a layer of torch.nn computes.",
            "                    The rest of an earlier one may differ. Record both runs again, with whole tensors:",
            f"                    steps=range({again.start}, {again.stop}), share=1, or"
            f" --steps {again.start}:{again.stop} --share 1",
        ]
    lines += ["", "Usual causes (! if the records show it):"]
    for cause in runs.causes:
        lines.append(f"  {'!' if cause.seen else '-'} {cause.name}: {cause.evidence}")
        lines.append(f"      {cause.advice}")
    typer.echo(os.linesep.join(lines))


def counted(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'}"


def draw(runs: Compared, path: Path) -> None:
    from dash_attn.tools.viz.parted import picture

    rank = runs.a[0].rank if runs.difference is None else runs.difference.rank
    pair = next(pair for pair in zip(runs.a, runs.b, strict=True) if pair[0].rank == rank)
    picture(*pair, runs.difference, path)
