"""The one generator of random inputs, and the reference in float64 of benchmarks, tools and most tests.

The gradients of the reference are written out as formulas. Tests check them against autograd. Some tests have a
reference of their own, which takes nothing from here: tests/backends/sm90/featured.py, and `by_hand` in
tests/api/test_features.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dash_attn.backends import Extras, Gradients, Operands, Options
from dash_attn.backends.dropout import kept, row_words, seeds_of
from dash_attn.prepare import prepare
from dash_attn.problem import Mask, Problem

CHUNK = 2**25  # scores of the float64 reference that live at once
NONE = Extras()
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
    dsinks: Tensor | None = None

    @property
    def gradients(self) -> Gradients:
        return Gradients(self.dq, self.dk, self.dv)


def draw(problem: Problem, device: torch.device, seed: int = 0, gain: float = 1.0) -> Drawn:
    """Normally distributed tensors with a standard deviation of `gain`."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(length: int, heads: int, dim: int) -> Tensor:
        shape = (problem.batch, length, heads, dim)
        return (torch.randn(shape, generator=generator, device=device) * gain).to(getattr(torch, problem.dtype))

    q, dout = (normal(problem.len_q, problem.heads_q, dim) for dim in (problem.dim, problem.dim_v))
    k, v = (normal(problem.len_k, problem.heads_kv, dim) for dim in (problem.dim, problem.dim_v))
    return Drawn(dout, q, k, v)


def draw_extras(problem: Problem, device: torch.device) -> Extras:
    """Random sinks and a seed, as the problem needs them, and a random gradient of lse. The same at every call."""
    generator = torch.Generator(device).manual_seed(1)
    sinks = torch.randn(problem.heads_q, generator=generator, device=device) if problem.features.sinks else None
    dlse = torch.randn((problem.batch, problem.heads_q, problem.len_q), generator=generator, device=device)
    return Extras(sinks, torch.tensor(7) if problem.features.dropout else None, dlse)


def sinks_for(problem: Problem, device: torch.device) -> Tensor | None:
    """The sinks of a problem, the same at every call; None if it has none."""
    return draw_extras(problem, device).sinks if problem.features.sinks else None


def draw_operands(problem: Problem, device: torch.device, seed: int = 0) -> Operands:
    """Random tensors, with out and lse of the forward that dash_attn.attention takes on this device, and with the sinks
    of `sinks_for` if the problem has sinks."""
    drawn, sinks = draw(problem, device, seed), sinks_for(problem, device)
    extras = None if sinks is None else Extras(sinks)
    out, lse = prepare(problem, "auto", Options(), device).forward(*drawn[1:], extras)
    return Operands(*drawn, out.contiguous(), lse.contiguous())


def input_sets(problem: Problem, device: torch.device) -> list[Operands]:
    """At least two sets. The cache holds no input of the previous call when the next call takes the next set."""
    first = draw_operands(problem, device)
    size = sum(x.numel() * x.element_size() for x in first)
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return [first, *(draw_operands(problem, device, seed) for seed in range(1, min(8, 2 + cache // size)))]


@torch.no_grad()
def exact(problem: Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, extras: Extras = NONE) -> Exact:
    """From the definition, in bands of queries: memory grows with the tokens, not with their square."""
    doubles = Drawn(*(x.double() for x in (dout, q, k, v)))
    sinks, dlse = extras.sinks, extras.dlse
    lse = doubles.q.new_full((problem.batch, problem.heads_q, problem.len_q), -torch.inf)
    result = Exact(torch.zeros_like(doubles.dout), lse, *(torch.zeros_like(x) for x in doubles[1:]))
    if sinks is not None:  # a row without keys has the sink as its lse
        lse.copy_(sinks[:, None])
        dsinks = torch.zeros_like(sinks, dtype=torch.float64)
        result = result._replace(dsinks=dsinks if dlse is None else dlse.double().sum((0, 2)))
    intervals = tuple(torch.from_numpy(x).to(q.device) for x in problem.mask.intervals(problem.len_q, problem.len_k))
    rows = max(16, CHUNK // max(1, problem.heads_q * problem.len_k))
    for begin in range(0, problem.len_q, rows):
        band = slice(begin, min(begin + rows, problem.len_q))
        keys, hidden = _hidden(problem.mask, intervals, band)
        if keys.start < keys.stop:
            for batch in range(problem.batch):
                _add_band(problem, Band(batch, band, keys, hidden), doubles, extras, result)
    return result


class Band(NamedTuple):
    """Some queries of one sequence of the batch, the keys from the first to the last that they see, and which of these
    keys each query does not see."""

    batch: int
    queries: slice
    keys: slice
    hidden: Tensor


def _add_band(problem: Problem, band: Band, drawn: Drawn, extras: Extras, result: Exact) -> None:
    """What a band of queries and the keys that it sees give, for all heads of one sequence at once."""
    batch, rows, keys, hidden = band
    cap = problem.features.softcap
    grouped = (problem.heads_kv, problem.group, -1)
    q, dout = (x[batch, rows].reshape(len(x[batch, rows]), *grouped) for x in (drawn.q, drawn.dout))
    k, v = drawn.k[batch, keys], drawn.v[batch, keys]
    scores = torch.einsum("mhgd,nhd->hgmn", q, k).mul_(problem.softmax_scale)
    slope = 1 - (scores / cap).tanh().square() if cap else None
    scores = (scores.div_(cap).tanh_().mul_(cap) if cap else scores).masked_fill_(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    if extras.sinks is not None:
        sink = extras.sinks.double().view(grouped)
        lse = torch.logaddexp(lse, sink)
    # A row without keys has lse = -inf, and -inf - -inf is not a number: its P is 0.
    p = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
    factor = None if extras.seed is None else _dropout(problem, band, extras.seed).to(p.device)
    weights = p if factor is None else p * factor
    out = torch.einsum("hgmn,nhd->mhgd", weights, v)
    dp = torch.einsum("mhgd,nhd->hgmn", dout, v)
    if factor is not None:
        dp.mul_(factor)
    delta = torch.einsum("mhgd,mhgd->hgm", out, dout)
    if extras.dlse is not None:
        delta -= extras.dlse[batch, :, rows].double().view(grouped)
    ds = dp.sub_(delta.unsqueeze(-1)).mul_(p).mul_(problem.softmax_scale)
    if slope is not None:
        ds.mul_(slope)
    result.out[batch, rows] = out.flatten(1, 2)
    result.lse[batch, :, rows] = lse.flatten(0, 1)
    result.dq[batch, rows] = torch.einsum("hgmn,nhd->mhgd", ds, k).flatten(1, 2)
    result.dk[batch, keys] += torch.einsum("hgmn,mhgd->nhd", ds, q)
    result.dv[batch, keys] += torch.einsum("hgmn,mhgd->nhd", weights, dout)
    if result.dsinks is not None:
        # The band is already in dsinks as rows without keys: their weight is 1, and their term is dlse.
        before = 0 if extras.dlse is None else extras.dlse[batch, :, rows].double().sum(-1)
        result.dsinks[:] += (-delta * (sink - lse).exp()).sum(-1).flatten() - before


def _dropout(problem: Problem, band: Band, seed: Tensor) -> Tensor:
    """0 or 1 / (1 - dropout) for each weight of a band, (kv heads, group, queries, keys)."""
    batch, queries, keys = band.batch, band.queries, band.keys
    seeds = seeds_of(seed, problem.given_sequences)
    factor = torch.zeros(problem.heads_q, queries.stop - queries.start, keys.stop - keys.start, dtype=torch.float64)
    for place, (q_row, k_row, len_q, len_k) in zip(problem.origins, problem.sequences, strict=True):
        q_row, k_row = q_row - batch * problem.len_q, k_row - batch * problem.len_k
        rows = range(max(q_row, queries.start), min(q_row + len_q, queries.stop))
        columns = range(max(k_row, keys.start), min(k_row + len_k, keys.stop))
        if place.number * problem.batch // problem.given_sequences == batch and rows and columns:
            key = np.arange(columns.start - k_row, columns.stop - k_row, dtype=np.uint32) + np.uint32(place.key)
            for head in range(problem.heads_q):
                words = row_words(seeds[place.number], head, place.row + rows.start - q_row, len(rows))
                into = factor[head, rows.start - queries.start : rows.stop - queries.start]
                into[:, columns.start - keys.start : columns.stop - keys.start] = torch.from_numpy(
                    kept(words, key, problem.features.dropout) / (1 - problem.features.dropout)
                )
    return factor.view(problem.heads_kv, problem.group, *factor.shape[1:])


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
    part, sinks = replace(problem, batch=1, heads_q=problem.group, heads_kv=1), sinks_for(problem, q.device)
    extras = NONE if sinks is None else Extras(sinks[-problem.group :])
    return exact(part, *(_part(problem, x) for x in (dout, q, k, v)), extras=extras).gradients


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
