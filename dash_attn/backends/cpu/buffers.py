"""What the workers read and write, cut into tiles: fp32 copies of the operands, sums, and the caller's gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dash_attn.backends.base import Gradients, Operands
from dash_attn.backends.cpu.planes import copies, planes
from dash_attn.backends.cpu.softmax import Softmax
from dash_attn.backends.cpu.threads import Job
from dash_attn.problem import Problem
from dash_attn.program import Geometry


@dataclass(frozen=True, eq=False)
class QueryTile:
    """Rows of one (batch, query head). `q` is already scaled: P = exp(q k^T - lse), dK = dS^T q. Row i sees keys
    `first[i]` up to `end[i] - 1`. Contributions are summed in `total`, and the result goes to `dq`."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    first: Tensor
    end: Tensor
    total: Tensor
    dq: Tensor
    words: Tensor | None = None  # of dropout, int32 (rows, 2)


@dataclass(frozen=True, eq=False)
class KeyTile:
    """Rows of one (batch, kv head). `index` has their key numbers, and `places` those that dropout counts. The results
    go to `dk` and `dv`."""

    k: Tensor
    k_t: Tensor
    v_t: Tensor
    index: Tensor
    places: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True, eq=False)
class Buffers:
    """Tiles by number: (batch * heads + head) * tiles + tile.

    All views are made here, once. A worker that made views would hold the interpreter, and other workers would wait.
    """

    queries: list[QueryTile]
    keys: list[KeyTile]
    parts: list[Tensor] | None  # dK and dV of cut chains, fp32 (batch, panels, keys, dim)

    @staticmethod
    def of(
        problem: Problem, g: Geometry, operands: Operands, grads: Gradients, softmax: Softmax | None
    ) -> tuple[Buffers, list[Job]]:
        """The buffers, and the jobs that fill them."""
        q, k, v, dout = (planes(x) for x in (operands.q, operands.k, operands.v, operands.dout))
        lse, delta = (torch.empty((*q.shape[:3], 1), dtype=torch.float32, device="cpu") for _ in range(2))
        first, end = (torch.from_numpy(x)[:, None] for x in problem.mask.intervals(problem.len_q, problem.len_k))
        queries = [
            q,
            dout,
            lse,
            delta,
            first.expand(*q.shape[:3], 1),
            end.expand(*q.shape[:3], 1),
            planes(operands.q),
            grads.dq.transpose(1, 2),
        ]
        if softmax is not None and softmax.seeds:
            queries.append(_words(problem, softmax))
        numbers = torch.from_numpy(np.arange(problem.len_k, dtype=np.int32))
        offset = 0 if softmax is None else softmax.key
        index, places = (x.expand(k.shape[:3]) for x in (numbers, numbers + offset if offset else numbers))
        parts, dk, dv = None, grads.dk.transpose(1, 2), grads.dv.transpose(1, 2)
        if g.share > 1:
            shapes = [(problem.batch, g.heads_kv, problem.len_k, dim) for dim in (problem.dim, problem.dim_v)]
            dk, dv = parts = [torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes]
        shared = (_tiles(x, g.tile_n, g.share) for x in (k, v, index, places))
        keys = (*shared, _tiles(dk, g.tile_n), _tiles(dv, g.tile_n))
        buffers = Buffers(
            [QueryTile(*fields) for fields in zip(*(_tiles(x, g.tile_m) for x in queries), strict=True)],
            [KeyTile(k, k.t(), v.t(), *others) for k, v, *others in zip(*keys, strict=True)],
            parts,
        )
        dlse = None if softmax is None else softmax.dlse
        marks = problem.mask.unseeing(problem.len_q, problem.len_k)
        unseeing = torch.from_numpy(marks)[:, None] if marks.any() else None
        heads = ((b, h) for b in range(problem.batch) for h in range(problem.heads_q))
        return buffers, [
            *copies(operands.q, q, problem.softmax_scale),
            *copies(operands.k, k),
            *copies(operands.v, v),
            *(partial(_fill, operands, dlse, RowPlanes(dout, lse, delta), unseeing, *at) for at in heads),
        ]


def _tiles(planes: Tensor, size: int, share: int = 1) -> list[Tensor]:
    """Views of a tensor (batch, heads, rows, ...), with `size` rows each. Every head comes `share` times."""
    return [tile for batch in planes for plane in batch for _ in range(share) for tile in plane.split(size)]


def _words(problem: Problem, softmax: Softmax) -> Tensor:
    rows = slice(0, problem.len_q)
    heads = [[softmax.words(b, h, rows) for h in range(problem.heads_q)] for b in range(problem.batch)]
    return torch.stack([torch.stack(each) for each in heads])


class RowPlanes(NamedTuple):
    """What the backward reads of the rows of out, (batch, heads, rows, ...)."""

    dout: Tensor
    lse: Tensor
    delta: Tensor


def _fill(
    operands: Operands, dlse: Tensor | None, into: RowPlanes, unseeing: Tensor | None, batch: int, head: int
) -> None:
    """dout, lse, and delta = sum(out * dout) - dlse of one (batch, head). `unseeing` marks rows that see no key."""
    dout, lse, delta = (x[batch, head] for x in into)
    dout.copy_(operands.dout[batch, :, head])
    lse.copy_(operands.lse[batch, head].unsqueeze(-1))
    out = torch.empty_like(dout, memory_format=torch.preserve_format)
    delta.copy_(out.copy_(operands.out[batch, :, head]).mul_(dout).sum(-1, keepdim=True))
    if dlse is not None:
        delta.sub_(dlse[batch, head].unsqueeze(-1))
    if unseeing is not None:
        # P is 0 in such a row. NaN or inf times 0 would be NaN in dK and dV of all keys in the tile.
        for x in (dout, delta):
            x.masked_fill_(unseeing & ~x.isfinite(), 0.0)
