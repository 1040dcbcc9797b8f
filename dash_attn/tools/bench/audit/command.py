"""`dash-attn audit`: words in, exit status out. 0: all bits equal; 1: something differs, hangs, breaks, is missing;
130: cut off."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from dash_attn.problem import CAUSAL, FULL, Mask, Problem
from dash_attn.tools.bench import record
from dash_attn.tools.bench.audit.audit import Plan, Report, Subject, audit
from dash_attn.tools.bench.audit.step import load
from dash_attn.tools.bench.audit.stressors import ON_CPU, ON_GPU, PROCESSES, stressors_on
from dash_attn.tools.bench.audit.targets import parse
from dash_attn.tools.bench.command import Parser, names, shape_options
from dash_attn.tools.bench.report import text_table


def parser() -> Parser:
    made = Parser(
        prog="dash-attn audit",
        description="Repeat a backward under stress and compare every bit. Without options: the default order of this "
        "machine's backend, a small problem, every stressor.",
    )
    made.add_argument(
        "--target",
        type=names,
        default=("ours",),
        help="ours, ours:POLICY, any (ours without an order), a peer of dash-attn bench, or module:function with the "
        "arguments of dash_attn.backward; several with commas",
    )
    made.add_argument("--step", type=Path, help="a saved step: torch.save of a dict of dout, q, k, v, out, lse, kwargs")
    words = (f"{', '.join(each)}" for each in (ON_GPU, ON_CPU))
    made.add_argument("--stress", type=names, help="on GPUs {}; on CPUs {}; processes".format(*words))
    made.add_argument("--repeats", type=int, default=20, help="of each stressor (default 20)")
    made.add_argument("--processes", type=int, default=2, help="fresh processes (default 2)")
    made.add_argument("--at-once", type=int, default=8, help="fresh processes side by side (default: up to 8)")
    made.add_argument("--timeout", type=float, default=180.0, help="seconds of silence that are a hang (default 180)")
    made.add_argument("--cpu", action="store_true", help="on the CPU, also where there is a GPU")
    made.add_argument("--json", action="store_true", help="one JSON value on standard output")
    made.add_argument("--out", type=Path, help="JSON file to write as well, again after every finding")
    shape_options(made)
    return made


def main(arguments: Sequence[str]) -> int:
    args = parser().parse_args(list(arguments))
    device = "cpu" if args.cpu or not torch.cuda.is_available() else "cuda"
    known = (*stressors_on(device), PROCESSES)
    stress = args.stress or known
    for name in stress:
        if name not in known:
            raise ValueError(f"--stress {name!r}: on this device choose from {', '.join(known)}")
    for option in ("repeats", "processes", "at_once", "timeout"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} must be at least 1, got {getattr(args, option)}")
    for target in args.target:
        parse(target)
    plan = Plan(device, tuple(stress), args.repeats, args.processes, args.timeout, args.at_once)
    environment = {"environment": record.environment(torch.device(device))}

    def keep(report: Report) -> None:
        if args.out is not None:
            record.write_json(environment | report, args.out)

    with _sigterm_as_ctrl_c():
        report = environment | audit(subjects(args, device), args.target, plan, keep)
    keep(report)
    print(json.dumps(report) if args.json else shown(report))
    return 130 if not report["complete"] else 0 if report["ok"] else 1


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """The end of a job's time says SIGTERM: children must not outlive it, and what was found is shown."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def subjects(args: argparse.Namespace, device: str) -> list[Subject]:
    """The saved step, or every shape that is given."""
    if args.step is not None:
        if any(getattr(args, name) is not None for name in ("seqlen", "headdim", "nheads", "causal", "dtype")):
            raise ValueError("--step brings its own shape: leave out --seqlen, --headdim, --nheads, --causal, --dtype")
        load(args.step, torch.device("cpu"))
        return [Subject(args.step.name, file=args.step)]
    cpu = device == "cpu"
    masks = [FULL, CAUSAL] if args.causal is None else [CAUSAL if args.causal else FULL]
    heads = args.nheads or (2 if cpu else 16)
    kv = args.nheads_kv or (heads if args.nheads else 1 if cpu else 4)
    dims, lengths = args.headdim or ((32,) if cpu else (64, 128)), args.seqlen or ((1024,) if cpu else (4096,))
    dtype = args.dtype or ("float32" if cpu else "bfloat16")

    def subject(n: int, dim: int, mask: Mask) -> Subject:
        problem = Problem(args.batch_size or 1, heads, kv, n, n, dim, dtype, mask=mask)
        return Subject(f"{problem.batch}x{n} {heads}/{kv} heads d{dim} {mask}", problem)

    return [subject(n, dim, mask) for dim in dims for mask in masks for n in lengths]


def shown(report: Report) -> str:
    """A line for each entry, then what differs and where."""
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
