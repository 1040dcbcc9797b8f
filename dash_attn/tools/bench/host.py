"""Host time: how long a call takes to return when the problem was seen before and the GPU is idle.

The GPU computes a small problem faster than Python can ask for it, so the host's time is the time of a step. Every call
is timed from an idle GPU until it returns; the GPU may still run then. Ours are `dash_attn.attention` under autograd,
forward and backward, the forward alone, and `dash_attn.backward` alone. Peers run forward and backward.

The clock of a host wanders within seconds. So variants take turns in short rounds, and a ratio of two variants is the
median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dash_attn
from dash_attn.backends import Gradients
from dash_attn.problem import CAUSAL, Problem, documents
from dash_attn.tools.bench.cases import BenchCase
from dash_attn.tools.bench.operands import TOLERANCE, draw, error, exact_part
from dash_attn.tools.bench.peers import on_gpu
from dash_attn.tools.bench.record import gpu_now, shape_of
from dash_attn.tools.bench.report import ResultRow
from dash_attn.tools.bench.timing import summary
from dash_attn.tools.bench.variants import Call, reason

CASES = (
    BenchCase("1x512 4 heads d64 causal", Problem(1, 4, 4, 512, 512, 64, mask=CAUSAL)),
    BenchCase(
        "packed, cu_seqlens on the device",
        Problem(1, 4, 4, 512, 512, 64, mask=documents([0, 90, 301, 512], causal=True)),
    ),
)
# Rounds, and the untimed and timed calls of each variant in a round. On a CPU they show that the harness works, and
# nothing about speed.
EFFORT = {"cuda": (20, 10, 30), "cpu": (2, 0, 1)}


@dataclass(frozen=True, eq=False)
class Setting:
    """A problem as callers pose it: tensors, packed ones (tokens, heads, dim), and keywords of dash_attn.attention."""

    problem: Problem
    qkv: list[Tensor]
    dout: Tensor
    how: dict[str, Any]

    @staticmethod
    def of(problem: Problem, device: torch.device) -> Setting:
        packing, how = problem.mask.documents, dict[str, Any](causal=problem.mask.right == 0)
        dout, *qkv = draw(problem, device)
        if packing is not None:
            dout, *qkv = (x[0] for x in (dout, *qkv))
            how["cu_seqlens"] = torch.tensor(packing.cu_q, dtype=torch.int32, device=device)
        return Setting(problem, [x.requires_grad_() for x in qkv], dout, how)


Timed = Callable[[Setting], Call]


def attention(setting: Setting) -> Call:
    qkv, dout, how = setting.qkv, setting.dout, setting.how
    return lambda: torch.autograd.grad(dash_attn.attention(*qkv, **how), qkv, dout)


def forward(setting: Setting) -> Call:
    qkv, how = setting.qkv, setting.how
    return lambda: (dash_attn.attention(*qkv, **how),)


def backward(setting: Setting) -> Call:
    qkv, how = setting.qkv, dict(setting.how)
    out, lse = dash_attn.attention(*qkv, **how, return_lse=True)
    operands = [x.detach() for x in (setting.dout, *qkv, out, lse)]
    if "cu_seqlens" in how:
        how["cu_seqlens_q"] = how.pop("cu_seqlens")
    return lambda: dash_attn.backward(*operands, **how)


def by_torch(setting: Setting) -> Call:
    """scaled_dot_product_attention in the layout that it takes, or varlen_attn."""
    causal, cu = setting.how["causal"], setting.how.get("cu_seqlens")
    if cu is not None:
        from torch.nn.attention.varlen import varlen_attn

        on_gpu(cu.device)
        longest, sides = _longest(setting), (-1, 0 if causal else -1)

        def packed() -> tuple[Tensor, ...]:
            q, k, v = setting.qkv
            out: Any = varlen_attn(q, k, v, cu, cu, longest, longest, window_size=sides)
            return torch.autograd.grad(out, setting.qkv, setting.dout)

        return packed
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in setting.qkv]
    dout, grouped = setting.dout.transpose(1, 2), setting.problem.group > 1

    def plain() -> tuple[Tensor, ...]:
        q, k, v = leaves
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return torch.autograd.grad(out, leaves, dout)

    return plain


def fa4(setting: Setting) -> Call:
    """FlashAttention-4 in its deterministic mode."""
    on_gpu(setting.dout.device)
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    how: dict[str, Any] = {"causal": setting.how["causal"], "deterministic": True}
    attend, cu = flash_attn_func, setting.how.get("cu_seqlens")
    if cu is not None:
        attend, longest = flash_attn_varlen_func, _longest(setting)
        how |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def call() -> tuple[Tensor, ...]:
        result = attend(*setting.qkv, **how)
        out = result[0] if isinstance(result, tuple) else result
        return torch.autograd.grad(out, setting.qkv, setting.dout)

    return call


OURS: dict[str, Timed] = {"attention": attention, "forward": forward, "backward": backward}
PEERS: dict[str, Timed] = {"torch": by_torch, "fa4 det": fa4}


def measure_host(device: torch.device, cases: Sequence[BenchCase] = CASES) -> list[ResultRow]:
    """A row for each case: microseconds until a call of each variant returns, and the `ratio` of attention to torch.
    `missing` could not run, `failed` ran and is wrong."""
    flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else nullcontext()
    with flash:  # around all calls: to choose torch's kernel at each of them would be timed with them
        return [_row(case, device) for case in cases]


def _row(case: BenchCase, device: torch.device) -> ResultRow:
    setting, (rounds, untimed, timed) = Setting.of(case.problem, device), EFFORT[device.type]
    row: ResultRow = {
        "cell": case.name,
        "shape": shape_of(case.problem),
        "default": "attention",
        "calls": rounds * timed,
    }
    row |= {"missing": {}, "failed": {}}
    want = _exact(setting)
    ready: dict[str, Call] = {}
    for name, make in (OURS | PEERS).items():
        try:
            call = make(setting)
            off = _error(setting, call(), want)
            ready[name] = call
            if not off <= TOLERANCE[case.problem.dtype]:
                row["failed"][name] = f"gradients are {off:.1e} from float64"
        except Exception as error:  # a peer may fail in any way: it is reported, and the others still run
            row["missing" if name in PEERS else "failed"][name] = reason(error)
    times: dict[str, list[list[float]]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, call in ready.items():
            times[name].append(host_us(call, device, untimed + timed)[untimed:])
    row["us"] = {name: summary([us for each in values for us in each]) for name, values in times.items()}
    row["ratio"] = ratio(times["attention"], times["torch"]) if {"attention", "torch"} <= times.keys() else None
    row["gpu"] = gpu_now(device)
    return row


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """How many times as long as `theirs` ours take, from the times of each round."""
    return statistics.median(
        statistics.median(own) / statistics.median(other) for own, other in zip(ours, theirs, strict=True)
    )


def host_us(call: Call, device: torch.device, count: int) -> list[float]:
    """Microseconds until each of `count` calls returns. The device is idle when a call begins."""
    times = []
    for _ in range(count):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def _exact(setting: Setting) -> Gradients:
    batched = [x.detach().reshape(setting.problem.batch, -1, *x.shape[-2:]) for x in (setting.dout, *setting.qkv)]
    return exact_part(setting.problem, *batched)


def _error(setting: Setting, results: tuple[Tensor, ...], want: Gradients) -> float:
    """Of gradients, laid out as any of the variants has them; 0 for a forward alone."""
    if len(results) != len(want):
        return 0.0
    heads_first = results[0].ndim == 4 and results[0].shape != setting.qkv[0].shape
    grads = [x.transpose(1, 2) if heads_first else x for x in results]
    return error(setting.problem, tuple(x.reshape(setting.problem.batch, -1, *x.shape[-2:]) for x in grads), want)


def _longest(setting: Setting) -> int:
    packing = setting.problem.mask.documents
    assert packing is not None
    return max(b - a for a, b in zip(packing.cu_q, packing.cu_q[1:], strict=False))
