"""One row of a result: every variant of a case, checked against float64, repeated, timed."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_attn.backends import Gradients
from dash_attn.tools.bench.audit.compare import largest
from dash_attn.tools.bench.cases import BenchCase
from dash_attn.tools.bench.operands import TOLERANCE, error, exact_part, input_sets
from dash_attn.tools.bench.ours import Ours
from dash_attn.tools.bench.peers import PEERS, peer
from dash_attn.tools.bench.record import gpu_now, shape_of
from dash_attn.tools.bench.report import ResultRow, pair_of
from dash_attn.tools.bench.timing import Timing, kernel_shares, peak_bytes, time_all
from dash_attn.tools.bench.variants import Call, Variant, reason

REPEATS = 3
PASSES = 10  # of the paper's table of deviations


@dataclass(frozen=True)
class Settings:
    """What runs beside what, and how long."""

    timing: Timing
    ours: Ours
    peers: tuple[str, ...] = ()
    deterministic_only: bool = False

    def variants(self, case: BenchCase) -> list[Variant]:
        """Peers first: ours is read against them."""
        variants = [*map(peer, self.peers), *self.ours.variants(case.problem, self.timing.device)]
        return [v for v in variants if v.deterministic or not self.deterministic_only]


def measure(case: BenchCase, settings: Settings) -> ResultRow:
    """Microseconds, memory and errors of every variant, and which share of a call of ours is the main kernel;
    `missing` could not run, `failed` ran and is wrong."""
    device = settings.timing.device
    row: ResultRow = {
        "cell": case.name,
        "shape": shape_of(case.problem),
        "flops": case.flops,
        "default": settings.ours.default(case.problem, device).name,
        "us": {},
        "peak_bytes": {},
        "error": {},
        "same_bits": {},
        "missing": {},
        "failed": {},
    }
    sets = input_sets(case.problem, device)
    want = exact_part(case.problem, *sets[0][:4])
    ready: dict[str, list[Call]] = {}
    for variant in settings.variants(case):
        try:
            calls = variant.prepare(case.problem, sets)
            _check(case, variant, calls[0], want, row)
            row["peak_bytes"][variant.name] = peak_bytes(calls[0], device)
            ready[variant.name] = calls
        except Exception as problem:  # a peer may fail in any way: it is reported, and the others still run
            _report(variant, problem, row)
    row["us"] = time_all(ready, settings.timing)
    whose = ("ours", "fa4") if settings.ours.unordered else ()  # where the price is asked for
    row["pairs"] = {who: us for who in whose if (us := _alone(pair_of(row, who), ready, settings.timing))}
    mine = {name: kernel_shares(calls[0], device) for name, calls in ready.items() if name not in PEERS}
    row["main_share"] = {name: shares[0] for name, shares in mine.items() if shares}
    row["gpu"] = gpu_now(device)
    return row


def _alone(names: tuple[str, str], ready: Mapping[str, Sequence[Call]], how: Timing) -> dict[str, dict[str, float]]:
    """A deterministic variant and its counterpart, timed by themselves: they draw the same power, so that neither finds
    the GPU cooler than the other does. Empty unless both are there."""
    return time_all({name: ready[name] for name in names}, how) if all(name in ready for name in names) else {}


def deviation(case: BenchCase, settings: Settings) -> ResultRow:
    """How far identical backward passes lie apart: the largest |g_r - g_first| of a pass, averaged over the passes."""
    row: ResultRow = {"cell": case.name, "shape": shape_of(case.problem), "deviation": {}, "missing": {}, "failed": {}}
    sets = input_sets(case.problem, settings.timing.device)[:1]
    for variant in settings.variants(case):
        try:
            (call,) = variant.prepare(case.problem, sets)
            first = [x.clone() for x in call()]
            apart = [_apart(call(), first) for _ in range(PASSES)]
            names = ("dq", "dk", "dv")
            row["deviation"][variant.name] = {
                "mean": sum(max(each) for each in apart) / PASSES,
                "worst": {name: max(each[i] for each in apart) for i, name in enumerate(names)},
                "differing_passes": sum(max(each) > 0 for each in apart),
                "deterministic": variant.deterministic,
            }
            if variant.deterministic and any(max(each) > 0 for each in apart):
                row["failed"][variant.name] = "promises determinism, and passes differ"
        except Exception as problem:  # as in `measure`
            _report(variant, problem, row)
    return row


def _check(case: BenchCase, variant: Variant, call: Call, want: Gradients, row: ResultRow) -> None:
    first = [x.clone() for x in call()]
    off = row["error"][variant.name] = error(case.problem, tuple(first), want)
    same = all(_same(call(), first) for _ in range(REPEATS))
    row["same_bits"][variant.name] = same
    if not off <= TOLERANCE[case.problem.dtype]:
        row["failed"][variant.name] = f"gradients are {off:.1e} from float64"
    elif variant.deterministic and not same:
        row["failed"][variant.name] = "promises determinism, and runs differ"


def _report(variant: Variant, problem: Exception, row: ResultRow) -> None:
    """What a peer cannot do, and what nobody has built, is missing; when ours breaks it has failed."""
    kind = "missing" if variant.name in PEERS or isinstance(problem, NotImplementedError | ImportError) else "failed"
    row[kind][variant.name] = reason(problem)


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _apart(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[float]:
    return [largest(a, b) for a, b in zip(some, others, strict=True)]


def release(device: torch.device) -> None:
    """A cell's graphs and workspaces must not count as the next one's memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
