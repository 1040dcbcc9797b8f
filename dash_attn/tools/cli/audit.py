"""dash-attn audit: whose backward is repeated, on which shapes, under which stress."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from dash_attn.problem import Problem
from dash_attn.tools.cli.app import Json, command, emit
from dash_attn.tools.cli.shapes import ShapeOptions
from dash_attn.tools.cli.workload import parse_names

if TYPE_CHECKING:
    from dash_attn.tools.bench.audit.audit import Plan, Report, Subject


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
    stress: Annotated[
        str | None, Option("--stress", help="stressors, separated by commas [default: all of this device]")
    ] = None
    repeats: Annotated[int, Option("--repeats", help="runs of each stressor")] = 20
    processes: Annotated[int, Option("--processes", help="fresh processes")] = 2
    at_once: Annotated[int, Option("--at-once", help="fresh processes that run side by side, at most")] = 8
    timeout: Annotated[float, Option("--timeout", help="seconds of silence that are a hang")] = 180.0
    cpu: Annotated[bool, Option("--cpu", help="audit on the CPU, also where there is a GPU")] = False
    out: Annotated[Path | None, Option("--out", help="JSON file to write too, again after every finding")] = None

    def device(self) -> str:
        import torch

        return "cpu" if self.cpu or not torch.cuda.is_available() else "cuda"

    def plan(self) -> Plan:
        from dash_attn.tools.bench.audit.audit import Plan
        from dash_attn.tools.bench.audit.stressors import PROCESSES, stressors_on

        known = (*stressors_on(self.device()), PROCESSES)
        stress = parse_names(self.stress) or known
        for name in stress:
            if name not in known:
                raise ValueError(f"--stress {name!r}: on this device choose from {', '.join(known)}")
        for option, given in (
            ("repeats", self.repeats),
            ("processes", self.processes),
            ("at-once", self.at_once),
            ("timeout", self.timeout),
        ):
            if given < 1:
                raise ValueError(f"--{option} must be at least 1, got {given}")
        return Plan(self.device(), stress, self.repeats, self.processes, self.timeout, self.at_once)


@command("audit")
def audit_command(options: AuditOptions, shape: ShapeOptions, as_json: Json = False) -> None:
    """Repeat a backward under stress and compare every bit.

    Without options: the default order of this machine's backend, a small problem, every stressor. The exit status is 0
    if all bits are equal, 1 if something differs, hangs, breaks or is missing, 130 if it was cut off.
    """
    import torch

    from dash_attn.tools.bench import record
    from dash_attn.tools.bench.audit.audit import audit
    from dash_attn.tools.bench.audit.targets import parse

    plan, targets = options.plan(), parse_names(options.target)
    for target in targets:
        parse(target)
    chosen = subjects(options, shape)
    environment = {"environment": record.environment(torch.device(plan.device))}

    def keep(report: Report) -> None:
        if options.out is not None:
            record.write_json(environment | report, options.out)

    with _sigterm_as_ctrl_c():
        report = environment | audit(chosen, targets, plan, keep)
    keep(report)
    if as_json:
        emit(report)
    else:
        typer.echo(shown(report))
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

    if options.step is not None:
        if shape.given():
            raise ValueError(f"--step brings its own shape: leave out {', '.join(shape.given())}")
        load(options.step, torch.device("cpu"))
        return [Subject(options.step.name, file=options.step)]
    if options.device() == "cpu":
        like = Problem(1, 2, 1, 1024, 1024, 32, "float32")
        return [Subject(*named) for named in shape.problems(like)]
    dims = (64, 128) if shape.head_dim is None else (128,)
    likes = [Problem(1, 16, 4, 4096, 4096, dim) for dim in dims]
    return [Subject(*named) for like in likes for named in shape.problems(like)]


def shown(report: Report) -> str:
    """A line for each entry, then what differs and where."""
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
    verdict = "all bits equal" if report["ok"] else "NOT all bits equal"
    text.append(verdict if report["complete"] else "NOT complete: cut off, the rest is not known")
    return "\n".join(text)
