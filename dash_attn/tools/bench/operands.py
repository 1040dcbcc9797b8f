"""The one generator of random inputs, and the one reference in float64: for benchmarks, tools and tests."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dash_attn.backends import Gradients, Operands, Options
from dash_attn.prepare import prepare
from dash_attn.problem import Mask, Problem

CHUNK = 2**25  # scores of the float64 reference that live at once
TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-5}  # relative, of a gradient


class Drawn(NamedTuple):
    """Random tensors of a problem, (batch, seqlen, heads, dim)."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class Exact(NamedTuple):
    """Everything that attention and its backward compute, in float64; shapes as in `Operands` and `Gradients`."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    @property
    def gradients(self) -> Gradients:
        return Gradients(self.dq, self.dk, self.dv)


def draw(problem: Problem, device: torch.device, seed: int = 0, gain: float = 1.0) -> Drawn:
    """Normally distributed tensors with a standard deviation of `gain`."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(length: int, heads: int) -> Tensor:
        shape = (problem.batch, length, heads, problem.dim)
        return (torch.randn(shape, generator=generator, device=device) * gain).to(getattr(torch, problem.dtype))

    q, dout = normal(problem.len_q, problem.heads_q), normal(problem.len_q, problem.heads_q)
    return Drawn(dout, q, normal(problem.len_k, problem.heads_kv), normal(problem.len_k, problem.heads_kv))


def draw_operands(problem: Problem, device: torch.device, seed: int = 0) -> Operands:
    """Random tensors, with out and lse of the forward that dash_attn.attention takes on this device."""
    drawn = draw(problem, device, seed)
    out, lse = prepare(problem, "auto", Options(), device).forward(*drawn[1:])
    return Operands(*drawn, out.contiguous(), lse.contiguous())


def input_sets(problem: Problem, device: torch.device) -> list[Operands]:
    """At least two sets. The cache holds no input of the previous call when the next call takes the next set."""
    first = draw_operands(problem, device)
    size = sum(x.numel() * x.element_size() for x in first)
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return [first, *(draw_operands(problem, device, seed) for seed in range(1, min(8, 2 + cache // size)))]


@torch.no_grad()
def exact(problem: Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Exact:
    """From the definition, in bands of queries: memory grows with the tokens, not with their square."""
    doubles = Drawn(*(x.double() for x in (dout, q, k, v)))
    result = Exact(
        torch.zeros_like(doubles.q),
        doubles.q.new_full((problem.batch, problem.heads_q, problem.len_q), -torch.inf),
        *(torch.zeros_like(x) for x in doubles[1:]),
    )
    intervals = tuple(torch.from_numpy(x).to(q.device) for x in problem.mask.intervals(problem.len_q, problem.len_k))
    rows = max(16, CHUNK // max(1, problem.heads_q * problem.len_k))
    for begin in range(0, problem.len_q, rows):
        band = slice(begin, min(begin + rows, problem.len_q))
        keys, hidden = _hidden(problem.mask, intervals, band)
        if keys.start < keys.stop:
            for batch in range(problem.batch):
                _add_band(problem, (batch, band, keys), hidden, doubles, result)
    return result


def _add_band(problem: Problem, where: tuple[int, slice, slice], hidden: Tensor, drawn: Drawn, result: Exact) -> None:
    """What a band of queries and the keys that it sees give, for all heads of one sequence at once."""
    batch, band, keys = where
    grouped = (-1, problem.heads_kv, problem.group, problem.dim)
    q, dout = (x[batch, band].reshape(grouped) for x in (drawn.q, drawn.dout))
    k, v = drawn.k[batch, keys], drawn.v[batch, keys]
    scores = torch.einsum("mhgd,nhd->hgmn", q, k).mul_(problem.softmax_scale).masked_fill_(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    # A row without keys has lse = -inf, and -inf - -inf is not a number: its P is 0.
    p = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
    out = torch.einsum("hgmn,nhd->mhgd", p, v)
    dp = torch.einsum("mhgd,nhd->hgmn", dout, v)
    ds = dp.sub_(torch.einsum("mhgd,mhgd->hgm", out, dout).unsqueeze(-1)).mul_(p).mul_(problem.softmax_scale)
    result.out[batch, band] = out.flatten(1, 2)
    result.lse[batch, :, band] = lse.flatten(0, 1)
    result.dq[batch, band] = torch.einsum("hgmn,nhd->mhgd", ds, k).flatten(1, 2)
    result.dk[batch, keys] += torch.einsum("hgmn,mhgd->nhd", ds, q)
    result.dv[batch, keys] += torch.einsum("hgmn,mhgd->nhd", p, dout)


def _hidden(mask: Mask, intervals: tuple[Tensor, ...], band: slice) -> tuple[slice, Tensor]:
    """The keys from the first to the last that a band of queries sees, and which of them each query does not see."""
    first, end = (x[band].unsqueeze(-1) for x in intervals)
    keys = slice(int(first.min()), int(end.max()))
    column = torch.arange(keys.start, keys.stop, device=first.device)
    hidden = (column < first) | (column >= end)
    if mask.tiles is not None:
        row = torch.arange(band.start, band.stop, device=first.device).unsqueeze(-1)
        cells = torch.from_numpy(mask.tiles.cells()).to(first.device)
        hidden |= ~cells[row // mask.tiles.cell_m, column // mask.tiles.cell_n]
    return keys, hidden


def exact_part(problem: Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Gradients of the last key/value head of the last sequence in float64: enough of a long problem to check it."""
    part = replace(problem, batch=1, heads_q=problem.group, heads_kv=1)
    return exact(part, *(_part(problem, x) for x in (dout, q, k, v))).gradients


def error(problem: Problem, got: tuple[Tensor, ...], want: Gradients) -> float:
    """Largest relative deviation of a gradient from `exact_part`; not a number if any element anywhere is none.

    Each document is compared by itself. Its deviation is relative to its own norm, or to that of as many average rows
    if that is larger: the gradients of a document of one token are 0.
    """
    if not all(bool(torch.isfinite(x).all()) for x in got):
        return float("nan")
    parts, cuts = (_part(problem, x).double() for x in got), problem.mask.documents
    if cuts is None:
        return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(parts, want, strict=True))
    ends = (cuts.cu_q, cuts.cu_k, cuts.cu_k)
    return max(_of_documents(a, b, cu) for a, b, cu in zip(parts, want, ends, strict=True))


def _of_documents(got: Tensor, want: Tensor, cu: tuple[int, ...]) -> float:
    squares = [x.square().sum((0, 2, 3)) for x in (got - want, want)]
    deviation, norm = (torch.stack([x[a:b].sum() for a, b in pairwise(cu)]) for x in squares)
    rows = torch.tensor(np.diff(cu), device=want.device)
    average = rows * (squares[1].sum() / max(1, cu[-1]))
    return float((deviation / torch.maximum(norm, average).clamp_min(1e-24)).max().sqrt())


def _part(problem: Problem, x: Tensor) -> Tensor:
    return x[-1:, :, -(x.shape[2] // problem.heads_kv) :]
