"""dash_attn::forward and dash_attn::backward: the operators that torch.compile and checkpointing know by name.

An operator takes tensors and plain values; what they pose is read inside, at run time. Tensors are (batch, seqlen,
heads, dim), packed sequences (1, tokens, heads, dim) with cu_seqlens. Called alone the operators carry no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from dash_attn.api.arguments import DTYPES, documents_of, wants_determinism
from dash_attn.api.calls import recall
from dash_attn.backends import Backward, Options, backend_for
from dash_attn.backends.base import Gradients, Operands
from dash_attn.plan import plan
from dash_attn.problem import Documents, Mask, Problem, TileMask


class Posed(NamedTuple):
    """A mask and a scale in types that an operator can take; window sides are -1 for no limit."""

    left: int
    right: int
    documents: list[int]  # cu_q, then cu_k
    tiles: str  # cell_m, cell_n, rows, columns, bits in hexadecimal
    scale: float | None

    @staticmethod
    def of(mask: Mask, scale: float | None) -> Posed:
        cu, cells = mask.documents, mask.tiles
        return Posed(
            -1 if mask.left is None else mask.left,
            -1 if mask.right is None else mask.right,
            [] if cu is None else [*cu.cu_q, *cu.cu_k],
            ""
            if cells is None
            else f"{cells.cell_m} {cells.cell_n} {cells.shape[0]} {cells.shape[1]} {_hex(cells.bits)}",
            None if scale is None else float(scale),
        )

    def problem(self, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Problem:
        half = len(self.documents) // 2
        cells = None
        if self.tiles:
            cell_m, cell_n, rows, columns, bits = self.tiles.split(" ")
            cells = TileMask(int(cell_m), int(cell_n), (int(rows), int(columns)), bytes.fromhex(bits))
        mask = Mask(
            None if self.left == -1 else self.left,
            None if self.right == -1 else self.right,
            Documents(tuple(self.documents[:half]), tuple(self.documents[half:])) if half else None,
            cells,
        )
        return Problem(
            batch=q.shape[0],
            heads_q=q.shape[2],
            heads_kv=k.shape[2],
            len_q=q.shape[1],
            len_k=k.shape[1],
            dim=q.shape[3],
            dtype=DTYPES[q.dtype],
            scale=self.scale,
            mask=mask & documents_of({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}, q, k),
        )


@torch.library.custom_op("dash_attn::forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    left: int,
    right: int,
    documents: Sequence[int],
    tiles: str,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    problem = Posed(left, right, list(documents), tiles, scale).problem(q, k, cu_seqlens_q, cu_seqlens_k)
    with torch.autocast(q.device.type, enabled=False):  # it would round what is computed in float32
        out, lse = backend_for(q.device).forward(problem, q, k, v)
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("dash_attn::backward", mutates_args=())
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    left: int,
    right: int,
    documents: Sequence[int],
    tiles: str,
    scale: float | None,
    policy: str,
    deterministic: bool | None,
    sm_margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    def checked() -> Backward:
        problem = Posed(left, right, list(documents), tiles, scale).problem(q, k, cu_seqlens_q, cu_seqlens_k)
        backend = backend_for(q.device)
        planned = plan(problem, backend.tile_shape(problem), policy)
        return backend.bound(planned, Options(ordered, sm_margin), operands)

    # None reaches here from compiled code: its answer must be that of the call, not that of the compilation.
    ordered, operands = wants_determinism(deterministic), Operands(dout, q, k, v, out, lse)
    posed = (left, right, tuple(documents), tiles, scale, policy, ordered, sm_margin)
    gradients = recall(operands, (cu_seqlens_q, cu_seqlens_k), posed, checked)
    into = Gradients(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)))
    with torch.autocast(q.device.type, enabled=False) if torch.is_autocast_enabled(q.device.type) else nullcontext():
        gradients(operands, into)
    return into.dq, into.dk, into.dv


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, len_q, heads, _dim = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, len_q), dtype=torch.float32)


@backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.compiler.assume_constant_result
def _hex(bits: bytes) -> str:
    """torch.compile knows bytes as constants, and none of their methods."""
    return bits.hex()
