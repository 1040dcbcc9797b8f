"""dash-attn audit: whose backward is repeated, on which shapes, under which stress."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from dash_attn.problem import Problem
from dash_attn.tools.cli.app import Json, command, earlier_value, emit
from dash_attn.tools.cli.shapes import ShapeOptions, parse_numbers
from dash_attn.tools.cli.workload import parse_names

if TYPE_CHECKING:
    from dash_attn.tools.bench.audit.audit import AuditSettings, Entry, Report, Subject


@dataclass(frozen=True)
class AuditOptions:
    """Who is audited, and how hard."""

    target: Annotated[
        str,
        Option(
            "--target",
            help="ours, ours:POLICY, any (ours without an order), a peer of bench, or module:function with the "
            "arguments of dash_attn.backward; several with commas",
        ),
    ] = "ours"
    step: Annotated[
        Path | None,
        Option("--step", help="a saved step: torch.save of a dict of dout, q, k, v, out, lse, kwargs"),
    ] = None
    pack: Annotated[
        str | None,
        Option("--pack", metavar="N,...", help="lengths of packed sequences, in the place of --seqlen and --batch"),
    ] = None
    stress: Annotated[
        str | None, Option("--stress", help="stressors, separated by commas [default: all of this device]")
    ] = None
    invariance: Annotated[
        bool,
        Option(
            "--invariance",
            help="compare out, lse and gradients of one sequence alone with those in a pack, in a batch, with fewer "
            "heads and with fewer SMs; --stress chooses among these changes",
        ),
    ] = False
    ranks: Annotated[
        str | None,
        Option(
            "--ranks",
            metavar="N,...",
            help="with --invariance: numbers of processes, separated by commas, on which the tokens of a batch and of "
            "a pack lie, in every mode and layout; --stress chooses among these, as in 2-a2a-zigzag",
        ),
    ] = None
    all_parts: Annotated[
        bool,
        Option(
            "--all",
            help="try everything that could break a promise, within --minutes (2, if not given): mutations of Program "
            "files, settings, interrupts, forks, damage to kernels, repeats; --stress chooses among these parts",
        ),
    ] = False
    repeats: Annotated[int, Option("--repeats", help="runs of each stressor")] = 20
    calls: Annotated[int, Option("--calls", help="calls in each repeat, without a pause; each call is a run")] = 1
    minutes: Annotated[
        float | None,
        Option(
            "--minutes",
            help="begin again with new inputs until this time is over, and add up what was found; --out is written "
            "again after every finding",
        ),
    ] = None
    seed: Annotated[
        int,
        Option("--seed", help="draws inputs, and with --all everything that is random; later rounds count on from it"),
    ] = 0
    processes: Annotated[int, Option("--processes", help="fresh processes")] = 2
    at_once: Annotated[int, Option("--at-once", help="fresh processes that run side by side, at most")] = 8
    timeout: Annotated[float, Option("--timeout", help="seconds of silence after which a process counts as hung")] = (
        180.0
    )
    cpu: Annotated[bool, Option("--cpu", help="audit on the CPU, also where there is a GPU")] = False
    out: Annotated[Path | None, Option("--out", help="JSON file to write the report to, again after every entry")] = (
        None
    )
    add: Annotated[bool, Option("--add", help="keep the entries that --out has")] = False

    def device(self) -> str:
        import torch

        return "cpu" if self.cpu or not torch.cuda.is_available() else "cuda"

    def settings(self) -> AuditSettings:
        from dash_attn.tools.bench.audit.audit import AuditSettings
        from dash_attn.tools.bench.audit.invariance import CHANGES
        from dash_attn.tools.bench.audit.ranks import spots_of
        from dash_attn.tools.bench.audit.stressors import PROCESSES, stressors_on

        ranks = parse_numbers("--ranks", self.ranks)
        if ranks and not self.invariance:
            raise ValueError("--ranks compares numbers of ranks: give --invariance too")
        known = (*stressors_on(self.device()), PROCESSES)
        if self.invariance:
            known = tuple(spots_of(ranks) if ranks else CHANGES)
        stress = (not self.all_parts and parse_names("--stress", self.stress)) or known
        for name in stress:
            if name not in known:
                raise ValueError(f"--stress {name!r}: on this device choose from {', '.join(known)}")
        for option, given in (
            ("repeats", self.repeats),
            ("calls", self.calls),
            ("processes", self.processes),
            ("at-once", self.at_once),
            ("timeout", self.timeout),
        ):
            if not 1 <= given < math.inf:
                raise ValueError(f"--{option} must be a number from 1, got {given:g}")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"--minutes must be a number above 0, got {self.minutes:g}")
        for option, given, default in (("seed", self.seed, 0), ("calls", self.calls, 1)):
            if self.invariance and given != default:
                raise ValueError(f"--{option}: --invariance compares single calls with inputs of its own: leave it out")
        effort = (self.repeats, self.processes, self.timeout, self.at_once, self.invariance)
        return AuditSettings(self.device(), stress, *effort, seed=self.seed, ranks=ranks, calls=self.calls)


def continued(earlier: Report | None, report: Report) -> Report:
    """A report with the entries of an earlier one before its own, each with the date of its run, and the counts of
    both."""
    from dash_attn.tools.bench import record
    from dash_attn.tools.bench.audit.audit import reported
    from dash_attn.tools.bench.report import dated

    if earlier is None:
        return report
    before, now = earlier["environment"], report["environment"]
    entries = [*dated(earlier["entries"], before), *dated(report["entries"], now)]
    complete = earlier["complete"] and report["complete"]
    return {"environment": record.joined(before, now)} | reported(entries, complete, report["counts"]["rounds"])


@command("audit")
def audit_command(options: AuditOptions, shape: ShapeOptions, as_json: Json = False) -> None:
    """Repeat a backward under stress and compare every bit.

    Without options: the default order of this machine's backend, a small problem, every stressor. With --invariance:
    the bits of one sequence in other company, or with --ranks on several processes; a control with a mistake runs too,
    and must differ. With --all: every promise that this machine can try. The exit status is 0 if all bits are equal and
    all promises hold, 1 if something differs, hangs, breaks or is missing, 130 if it is interrupted. With --minutes it
    can be left running.
    """
    import torch

    from dash_attn.tools.bench import record
    from dash_attn.tools.bench.audit.audit import audit
    from dash_attn.tools.bench.audit.rounds import audit_for
    from dash_attn.tools.bench.audit.targets import CONTROL, parse

    settings, targets = options.settings(), parse_names("--target", options.target)
    if options.all_parts:
        from dash_attn.tools.cli.everything import audit_everything

        with _sigterm_as_ctrl_c():
            raise typer.Exit(audit_everything(options, shape.given(), settings, as_json))
    for target in targets:
        if parse(target)[0] != "ours" and settings.ranks:
            raise ValueError(f"--target {target}: --ranks compares ours and ours:POLICY only")
    targets += (CONTROL,) if options.invariance else ()
    chosen = subjects(options, shape)
    environment = record.environment(torch.device(settings.device))
    earlier = earlier_value(options.out, options.add)
    if earlier is not None:
        record.joined(earlier["environment"], environment)  # another machine is refused before anything runs

    def keep(report: Report) -> None:
        if options.out is not None:
            record.write_json(continued(earlier, {"environment": environment} | report), options.out)

    with _sigterm_as_ctrl_c():
        if options.minutes is None:
            report = audit(chosen, targets, settings, keep)
        else:
            report = audit_for(options.minutes, chosen, targets, settings, keep)
    keep(report)
    report = {"environment": environment} | report
    if as_json:
        emit(report)
    else:
        typer.echo(shown_invariance(report) if options.invariance else shown(report))
    raise typer.Exit(130 if not report["complete"] else 0 if report["ok"] else 1)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """The end of a job's time says SIGTERM: children must not outlive it, and what was found is shown."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def subjects(options: AuditOptions, shape: ShapeOptions) -> list[Subject]:
    """The saved step, or every shape that is given."""
    import torch

    from dash_attn.tools.bench.audit.audit import Subject
    from dash_attn.tools.bench.audit.step import load

    if options.pack is not None:
        return packs(options, shape)
    if options.invariance:
        return [Subject(*named) for like in sequences(options, shape) for named in shape.problems(like)]
    if options.step is not None:
        if shape.given():
            raise ValueError(f"--step brings its own shape: leave out {', '.join(shape.given())}")
        load(options.step, torch.device("cpu"))
        return [Subject(options.step.name, file=options.step)]
    long = 1024 if options.device() == "cpu" else 4096
    return [Subject(*named) for like in usual(options, shape, long) for named in shape.problems(like)]


def usual(options: AuditOptions, shape: ShapeOptions, length: int) -> list[Problem]:
    """The shapes of this device, for what is not given."""
    if options.device() == "cpu":
        return [Problem(1, 2, 1, length, length, 32, "float32")]
    return [Problem(1, 16, 4, length, length, dim) for dim in ((64, 128) if shape.head_dim is None else (128,))]


def packs(options: AuditOptions, shape: ShapeOptions) -> list[Subject]:
    """The same pack with every head dim and mask."""
    from dash_attn.tools.bench.audit.audit import Subject

    for option, given in (
        ("--step", options.step),
        ("--batch", shape.batch),
        ("--seqlen", shape.seqlen),
        ("--invariance", options.invariance or None),
    ):
        if given is not None:
            raise ValueError(f"{option}: --pack gives the sequences: leave it out")
    lengths = parse_numbers("--pack", options.pack)
    likes = usual(options, shape, sum(lengths))
    named = [each for like in likes for each in shape.problems(like)]
    return [Subject(f"pack of {len(lengths)}, {name}", problem, pack=lengths) for name, problem in named]


def sequences(options: AuditOptions, shape: ShapeOptions) -> list[Problem]:
    """One sequence, whose last tile is not full."""
    for option, given in (("--step", options.step), ("--batch", shape.batch)):
        if given is not None:
            raise ValueError(f"{option}: --invariance computes one sequence of a given shape: leave it out")
    if options.device() == "cpu":
        return [Problem(1, 4, 2, 900, 900, 32, "float32")]
    return [Problem(1, 16, 4, 1900, 1900, dim) for dim in ((64, 128) if shape.head_dim is None else (128,))]


def shown_invariance(report: Report) -> str:
    """A line for each case and change, a column for each target: whether the bits stay, or which tensors differ."""
    from dash_attn.tools.bench.audit.targets import CONTROL
    from dash_attn.tools.bench.report import text_table

    cells: dict[tuple[str, str, str], str] = {}
    for e in report["entries"]:
        cells[e["case"], e["stressor"], e["target"]] = same_in(e)
    targets = list(dict.fromkeys(e["target"] for e in report["entries"]))
    lines = []
    for case, change in dict.fromkeys((case, change) for case, change, _ in cells if change != "-"):
        # A target that does not run at all has one entry, whose change is "-".
        shown_here = [cells.get((case, change, target), cells.get((case, "-", target), "-")) for target in targets]
        lines.append([case, change, *shown_here])
    text = [text_table(["case", "same bits", *targets], lines)]
    text += [f"{e['case']}, {e['target']}, {e['stressor']}: {e['why']}" for e in report["entries"] if e["why"]]
    if any(e["target"] == CONTROL and e["status"] == "same bits" for e in report["entries"]):
        text.append(
            f"{CONTROL}: it changes its order and keeps its bits, so this audit notices nothing. A short sequence has "
            "one tile, and so one order: give a longer --seqlen"
        )
    return "\n".join([*text, verdict(report)])


def same_in(entry: Entry) -> str:
    words = {"same bits": "yes", "not applicable": "-", "DIFFERS": f"NO: {', '.join(entry['tensors'])}"}
    return words.get(str(entry["status"]), str(entry["status"]))


def verdict(report: Report) -> str:
    from dash_attn.tools.bench.audit.rounds import in_words

    counted = f" ({in_words(report)})"
    if not report["complete"]:
        return f"NOT complete: cut off, the rest is not known{counted}"
    return ("all bits equal" if report["ok"] else "NOT all bits equal") + counted


def shown(report: Report) -> str:
    """A line for each entry, then what differs and where."""
    from dash_attn.tools.bench.audit.rounds import under
    from dash_attn.tools.bench.report import text_table

    lines = [
        [e["case"], e["target"], e["stressor"], str(e["runs"]), str(e["differing"]), e["status"]]
        for e in report["entries"]
    ]
    text = [text_table(["case", "target", "stressor", "runs", "differ", "status"], lines)]
    for e in report["entries"]:
        where = f"{e['case']}, {e['target']}, {e['stressor']}"
        if e["why"]:
            text.append(f"{where}: {e['status']}: {e['why']}")
        for name, t in e["tensors"].items():
            text.append(
                f"{where}: {name} differs in {t['runs']} of {e['runs']} runs, in up to {t['elements']} elements, first "
                f"at {t['first']} ({t['values'][0]:.9g} for {t['values'][1]:.9g}), by at most {t['largest']:.3g}"
            )
    return "\n".join([*text, *under(report["stressors"]), verdict(report)])
