"""A training step: layers of attention, forward and backward under autograd, with a new packing in every step.

cu_seqlens is a tensor on the device, as a data loader gives it. Every timed step has a layout that its variant has not
seen. The layouts are drawn before anything is timed. Two times are taken of a step: `us` from its begin to its end on
the device, and `host_us` until the host has asked for all of it. Variants take turns, each step in another sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random
from typing import Any

import torch
from torch import Tensor

import dash_attn
from dash_attn.backends import backend_for
from dash_attn.pack import assemble
from dash_attn.problem import Problem
from dash_attn.tools.bench import peers
from dash_attn.tools.bench.cases import BenchCase
from dash_attn.tools.bench.measure import Settings
from dash_attn.tools.bench.operands import TOLERANCE, Drawn, draw, error, exact_part
from dash_attn.tools.bench.packs import pack_kind_of
from dash_attn.tools.bench.record import gpu_now, shape_of
from dash_attn.tools.bench.report import ResultRow
from dash_attn.tools.bench.timing import event, summary
from dash_attn.tools.bench.variants import reason

# Layers, layouts of untimed steps, and layouts of the steps before those, which are assembled only. On a CPU they show
# that the harness works, and nothing about speed.
EFFORT = {"cuda": (16, 12, 200), "cpu": (2, 2, 2)}
OURS = "auto"

Attend = Callable[..., Any]  # q, k, v, and the keywords of flash_attn_varlen_func


@dataclass(frozen=True, eq=False)
class Layers:
    """The tensors of every layer, (tokens, heads, dim): q, k and v are leaves, and all layers have one dout."""

    qkv: list[list[Tensor]]
    dout: Tensor

    @staticmethod
    def of(problem: Problem, device: torch.device, count: int) -> Layers:
        drawn = [draw(problem, device, seed) for seed in range(count)]
        return Layers([[x[0].requires_grad_() for x in each[1:]] for each in drawn], drawn[0].dout[0])

    def step(self, attend: Attend, packing: dict[str, Any]) -> tuple[Tensor, ...]:
        """The gradients of all leaves, layer after layer."""
        outs = [_first(attend(*qkv, **packing)) for qkv in self.qkv]
        leaves = [x for qkv in self.qkv for x in qkv]
        return torch.autograd.grad(outs, leaves, [self.dout] * len(outs))

    def error(self, problem: Problem, gradients: Sequence[Tensor]) -> float:
        """Of the last layer."""
        operands = Drawn(*(x.detach().unsqueeze(0) for x in (self.dout, *self.qkv[-1])))
        return error(problem, tuple(x.unsqueeze(0) for x in gradients[-3:]), exact_part(problem, *operands))


def variants(settings: Settings) -> dict[str, Callable[[], Attend]]:
    """Ours and the peers that are asked for, each with its varlen function."""
    device = settings.timing.device
    asked = [name for name in settings.peers if name.endswith(" det") or not settings.deterministic_only]
    return {OURS: lambda: _ours} | {name: lambda name=name: _peer(name, device) for name in asked}


def _ours(q: Tensor, k: Tensor, v: Tensor, **packing: Any) -> Any:
    return dash_attn.flash_attn_varlen_func(q, k, v, **packing)


def _peer(name: str, device: torch.device) -> Attend:
    if name not in ("fa4", "fa4 det"):
        raise NotImplementedError("a step is called for dash_attn and FlashAttention-4 only")
    peers.on_gpu(device)
    from flash_attn.cute.interface import flash_attn_varlen_func

    return lambda q, k, v, **packing: flash_attn_varlen_func(q, k, v, deterministic=name == "fa4 det", **packing)


def measure_step(case: BenchCase, settings: Settings) -> ResultRow:
    """Microseconds of a step on the device and on the host, by variant, and our host time to assemble a new layout.
    `missing` could not run, `failed` ran and is wrong."""
    device, kind = settings.timing.device, pack_kind_of(case)
    layers, untimed, assembled = EFFORT[device.type]
    drawn = islice(kind.problems(0), untimed + settings.timing.rounds)
    layouts = [replace(layout, dtype=case.problem.dtype) for layout in drawn]
    before, new = layouts[:untimed], layouts[untimed:]
    tensors = Layers.of(layouts[0], device, layers)
    row: ResultRow = {
        "cell": case.name,
        "shape": shape_of(case.problem),
        "layers": layers,
        "steps": settings.timing.rounds,
        "default": OURS,
        **{key: {} for key in ("us", "host_us", "error", "same_bits", "missing", "failed")},
    }
    for layout in islice(kind.problems(1), assembled):  # a run that has begun knows the templates of most lengths
        assemble_us(replace(layout, dtype=case.problem.dtype), device)
    ready: dict[str, Attend] = {}
    for name, make in variants(settings).items():
        try:
            attend = make()
            _check(name, before[0], tensors, attend, row)
            for layout in before[1:]:
                tensors.step(attend, peers.varlen(layout, device))
            ready[name] = attend
        except Exception as problem:  # a peer may fail in any way: it is reported, and the others still run
            row["failed" if name == OURS else "missing"][name] = reason(problem)
    _time(tensors, ready, before, new, row)
    row["assemble_us"] = summary([assemble_us(layout, device) for layout in new])
    row["gpu"] = gpu_now(device)
    return row


def _check(name: str, layout: Problem, tensors: Layers, attend: Attend, row: ResultRow) -> None:
    packing = peers.varlen(layout, tensors.dout.device)
    first = tensors.step(attend, packing)
    off = row["error"][name] = tensors.error(layout, first)
    same = all(torch.equal(a, b) for a, b in zip(tensors.step(attend, packing), first, strict=True))
    row["same_bits"][name] = same
    if not off <= TOLERANCE[layout.dtype]:
        row["failed"][name] = f"gradients are {off:.1e} from float64"
    elif name in (OURS, "fa4 det") and not same:
        row["failed"][name] = "promises determinism, and runs differ"


def _time(
    tensors: Layers, ready: dict[str, Attend], before: Sequence[Problem], new: Sequence[Problem], row: ResultRow
) -> None:
    """A step of each variant for each new layout. Each has an untimed step of a known layout before it, so that it is
    timed at its own clock."""
    device, rng = tensors.dout.device, Random()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
    for number, layout in enumerate(new):
        for name in rng.sample(list(ready), len(ready)):
            # Tensors of their own: a tensor that was read before is not read again.
            known, unseen = (peers.varlen(each, device) for each in (before[number % len(before)], layout))
            tensors.step(ready[name], known)
            times[name].append(step_us(partial(tensors.step, ready[name], unseen), device))
    for name, pairs in times.items():
        row["us"][name], row["host_us"][name] = (summary(each) for each in zip(*pairs, strict=True))


def step_us(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Microseconds of a step that begins on an idle device: until it is done, and until it returns."""
    if device.type != "cuda":
        began = time.perf_counter()
        step()
        us = (time.perf_counter() - began) * 1e6
        return us, us
    begin, end = event(), event()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    begin.record()
    step()
    end.record()
    host = (time.perf_counter() - began) * 1e6
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) * 1e3, host


def assemble_us(layout: Problem, device: torch.device) -> float:
    """Microseconds of the host to make the tables of a new layout whose templates are known."""
    shape = backend_for(device).tile_shape(layout)
    assemble(layout, shape, OURS)
    new = replace(layout)  # without what the first one has computed
    began = time.perf_counter()
    assemble(new, shape, OURS)
    return (time.perf_counter() - began) * 1e6


def _first(result: Any) -> Tensor:
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out
