"""What the workers read and write, cut into tiles: fp32 copies of the operands, sums, and the caller's gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dash_attn.backends.base import Gradients, Operands
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


@dataclass(frozen=True, eq=False)
class KeyTile:
    """Rows of one (batch, kv head). `index` has their key numbers. The results go to `dk` and `dv`."""

    k: Tensor
    k_t: Tensor
    v_t: Tensor
    index: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True, eq=False)
class Buffers:
    """Tiles by number: (batch * heads + head) * tiles + tile.

    All views are made here, once. A worker that made views would hold the interpreter, and other workers would wait.

    Operands are copied even if they are fp32. The products then always have the same strides and alignment, which can
    change the bits of a library's product.
    """

    queries: list[QueryTile]
    keys: list[KeyTile]
    parts: tuple[Tensor, Tensor] | None  # dK and dV of cut chains, fp32 (batch, panels, keys, dim)

    @staticmethod
    def of(problem: Problem, geometry: Geometry, operands: Operands, grads: Gradients) -> Buffers:
        q, k, v, dout, out = (
            x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
            for x in (operands.q, operands.k, operands.v, operands.dout, operands.out)
        )
        first, end = (torch.from_numpy(x)[:, None] for x in problem.mask.intervals(problem.len_q, problem.len_k))
        queries = (
            q.mul_(problem.softmax_scale),
            dout,
            operands.lse.unsqueeze(-1),
            out.mul_(dout).sum(-1, keepdim=True),
            first.expand(*q.shape[:3], 1),
            end.expand(*q.shape[:3], 1),
            torch.empty_like(q),
            grads.dq.transpose(1, 2),
        )
        index = torch.arange(problem.len_k, dtype=torch.int32).expand(k.shape[:3])
        parts = None
        dk, dv = grads.dk.transpose(1, 2), grads.dv.transpose(1, 2)
        if geometry.share > 1:
            k, v, index = (x.repeat_interleave(geometry.share, 1) for x in (k, v, index))
            dk, dv = parts = torch.empty_like(k), torch.empty_like(v)
        keys = (k, v, index, dk, dv)
        return Buffers(
            [QueryTile(*parts) for parts in zip(*(_tiles(x, geometry.tile_m) for x in queries), strict=True)],
            [
                KeyTile(k, k.t(), v.t(), index, dk, dv)
                for k, v, index, dk, dv in zip(*(_tiles(x, geometry.tile_n) for x in keys), strict=True)
            ],
            parts,
        )


def _tiles(planes: Tensor, size: int) -> list[Tensor]:
    """Views of a tensor (batch, heads, rows, ...), with `size` rows each."""
    return [tile for batch in planes for plane in batch for tile in plane.split(size)]
