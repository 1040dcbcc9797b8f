"""`dash-attn bench`, and `python -m dash_attn.tools.bench` where typer is not installed."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from dash_attn.order import POLICIES, parse
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.tools.bench import cases
from dash_attn.tools.bench.cases import BenchCase, Model
from dash_attn.tools.bench.measure import Settings
from dash_attn.tools.bench.ours import Ours
from dash_attn.tools.bench.peers import PEERS, peer
from dash_attn.tools.bench.report import Result
from dash_attn.tools.bench.suites import QUICK, SUITES, Suite, run_suite, shown
from dash_attn.tools.bench.timing import Timing

# A block that takes a second on a CPU: it tries the harness where there is no GPU.
TINY_BLOCK = Model("tiny", 64, 2, 1, 32, 128, CAUSAL, lengths=(128,))


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for a mistake, so that the caller shows it like any other error."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} ({self.prog} --help lists the options)")


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[int, ...]:
    try:
        parsed = tuple(int(part) for part in names(text))
    except ValueError:
        parsed = ()
    if not parsed or min(parsed) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers from 1, separated by commas")
    return parsed


def shape_options(parser: argparse.ArgumentParser) -> None:
    """Options that name a shape in FlashAttention's words."""
    group = parser.add_argument_group("shape")
    group.add_argument("--batch-size", type=int, help="sequences")
    group.add_argument("--nheads", type=int, help="query heads")
    group.add_argument("--nheads-kv", type=int, help="key/value heads, if fewer")
    group.add_argument("--seqlen", type=numbers, help="tokens of a sequence; several with commas")
    group.add_argument("--headdim", type=numbers, help="head dim; several with commas")
    group.add_argument("--causal", action=argparse.BooleanOptionalAction, default=None, help="mask (bench: both)")
    group.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16, on CPUs float32")


def parser() -> Parser:
    made = Parser(
        prog="dash-attn bench",
        description="Time the backward beside its peers, check it against float64, and print tables. Without shape "
        "options a whole suite runs; --seqlen, --headdim and --causal choose among its cases; with --nheads they "
        "pose cases of their own.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="suites:\n" + "\n".join(f"  {name:10} {suite.title}" for name, suite in SUITES.items()),
    )
    made.add_argument("--suite", default="grid", choices=(*SUITES, "all"), help="what to measure (default: grid)")
    made.add_argument("--quick", action="store_true", help="fewer cases, peers and rounds: two minutes instead of ten")
    made.add_argument("--cpu", action="store_true", help="a tiny case on the CPU: shows that the harness works")
    made.add_argument("--deterministic", action="store_true", help="only variants that promise equal bits")
    made.add_argument(
        "--peers", type=names, help=f"all, none, or some of {', '.join(name.replace(' ', '_') for name in PEERS)}"
    )
    made.add_argument("--policies", type=names, help=f"orders of ours: some of {', '.join(POLICIES)}, with :width")
    made.add_argument("--any", action=argparse.BooleanOptionalAction, help="also ours without an order, the control")
    made.add_argument(
        "--config",
        type=_json_object,
        nargs="+",
        default=[{}],
        help="JSON of kernel config fields to change, one or more",
    )
    made.add_argument("--rounds", type=int, help="samples of each variant (default 15 or the suite's, --quick 5)")
    made.add_argument("--budget-ms", type=float, help="time of each variant (default 100 or the suite's)")
    made.add_argument(
        "--lead-ms",
        type=float,
        help="untimed calls of the same variant before each sample (default 10 or the suite's): they bring the GPU to "
        "the clock of this variant",
    )
    made.add_argument("--out", type=Path, help="file.json, or a folder (default: benchmarks/results)")
    made.add_argument("--add", action="store_true", help="keep the rows of --out that this run does not measure")
    shape_options(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command. The exit status is 0 if everything that ran was right, 1 if something failed."""
    args = parser().parse_args(list(arguments))
    for option, allowed in (("rounds", 1), ("budget_ms", 0.1), ("lead_ms", 0.1)):
        given = getattr(args, option)
        if given is not None and given < allowed:
            raise ValueError(f"--{option.replace('_', '-')} must be at least {allowed}, got {given}")
    chosen = list(SUITES) if args.suite == "all" else [args.suite]
    device = _device(args)
    failed = False
    for name in chosen:
        path = _out(args, name, device)
        result = run_suite(
            name,
            cases_of(args, name),
            _settings(args, SUITES[name], device),
            path,
            (TINY_BLOCK,) if args.cpu else cases.MODELS,
            _earlier(path) if args.add else None,
        )
        print(shown(result), end="\n\n")
        failed |= any(row["failed"] for row in result["rows"])
        if path is not None:
            print(f"wrote {path}")
    return int(failed)


def cases_of(args: argparse.Namespace, name: str) -> list[BenchCase]:
    """Cases of the given shape if heads are given, else the cases of the suite that match the options."""
    masks = [FULL, CAUSAL] if args.causal is None else [CAUSAL if args.causal else FULL]
    if args.nheads is not None:
        if name == "block":
            raise ValueError("--nheads: a block has the heads of its model")
        return [
            _case(args, n, d, mask) for d in args.headdim or (128,) for mask in masks for n in args.seqlen or (4096,)
        ]
    if args.batch_size is not None or args.nheads_kv is not None:
        raise ValueError("--batch-size and --nheads-kv go with --nheads")
    suite = SUITES[name]
    if args.cpu and name != "host":
        some = TINY_BLOCK.cases() if name == "block" else cases.tiny()
        some = [replace(case, problem=replace(case.problem, dtype="float32")) for case in some]
    else:
        some = suite.quick() if args.quick else suite.cases()
    some = [
        case
        for case in some
        if (args.causal is None or case.problem.mask in masks)
        and case.problem.dim in (args.headdim or (case.problem.dim,))
        and case.problem.len_q in (args.seqlen or (case.problem.len_q,))
    ]
    if not some:
        raise ValueError(f"no case of suite {name} has this --seqlen, --headdim and --causal; give --nheads for others")
    return some


def _case(args: argparse.Namespace, length: int, dim: int, mask: Any) -> BenchCase:
    kv = args.nheads if args.nheads_kv is None else args.nheads_kv
    dtype = args.dtype or ("float32" if args.cpu else "bfloat16")
    problem = Problem(args.batch_size or 1, args.nheads, kv, length, length, dim, dtype, mask=mask)
    return BenchCase(f"{problem.batch}x{length} {args.nheads}/{kv} heads d{dim} {mask}", problem)


def _settings(args: argparse.Namespace, suite: Suite, device: torch.device) -> Settings:
    peers = suite.quick_peers if args.quick else suite.peers
    if args.peers is not None:
        words = {("all",): tuple(PEERS), ("none",): ()}
        peers = words.get(args.peers) or tuple(peer(name).name for name in args.peers if name != "none")
    policies = args.policies or (("auto",) if args.quick else suite.policies)
    for policy in policies:
        if parse(policy).policy not in ("auto", *POLICIES):
            raise ValueError(f"--policies {policy!r}: choose from auto, {', '.join(POLICIES)}")
    unordered = suite.unordered if args.any is None else args.any
    ours = Ours(policies, unordered, tuple(args.config))
    effort = QUICK if args.quick else suite.effort
    how = (args.rounds or effort.rounds, args.budget_ms or effort.budget_ms, args.lead_ms or effort.lead_ms)
    return Settings(Timing(device, *how), ours, peers, args.deterministic)


def _device(args: argparse.Namespace) -> torch.device:
    if args.cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("no CUDA GPU here: throughput is measured on Hopper GPUs. --cpu runs a tiny case on the CPU")
    return torch.device("cuda", torch.cuda.current_device())


def _out(args: argparse.Namespace, name: str, device: torch.device) -> Path | None:
    if args.out is None and args.cpu:
        return None
    if args.out is not None and args.out.suffix == ".json":
        if args.suite == "all":
            raise ValueError(f"--out {args.out}: --suite all writes a file for each suite, give a folder")
        return Path(args.out)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    kind = re.sub(r"[^a-z0-9]+", "_", kind.lower().removeprefix("nvidia").strip())
    folder = args.out or Path("benchmarks/results")
    return Path(folder) / f"{name}_{kind}.json"


def _earlier(path: Path | None) -> Result | None:
    if path is None or not path.is_file():
        return None
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _json_object(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: expected an object of config fields")
    return fields
