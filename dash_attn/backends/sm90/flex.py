"""The forward of torch's flex_attention: for masks that no flash kernel takes, and for features without a flash kernel.

The mask goes there as tensors: which 128 x 128 blocks a query sees, and the first key and one past the last key of each
row. Compiled code reads them at run time, so one compilation serves all masks of a shape. Softcap is a function of a
score. Sinks are added to the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dash_attn.backends.base import Extras
from dash_attn.problem import FULL, Mask, Problem, tiles

from .fa4 import sinks_of
from .tables import Uploads, joined

BLOCK = 128  # queries and keys of a block of its mask
LEAST_DIM = 16  # its products have at least 16 columns
# Short inputs would go to a kernel that cuts the keys by the number of SMs, batch entries and heads. The bits of a
# sequence must not follow from these.
OPTIONS: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
# A look at cells in the innermost loop is a load of 128 x 128 integers. Two of them at once do not fit shared memory.
CELL_OPTIONS = {**OPTIONS, "num_stages": 1}
COMPILER = "inductor"

Whole = npt.NDArray[np.int32]


class Blocks(NamedTuple):
    """For each block of queries the blocks of keys that it sees in part, and those that it sees whole: how many there
    are, and their numbers, in ascending order. Numbers behind the last one are 0."""

    partial_count: Whole
    partial: Whole
    full_count: Whole
    full: Whole


class MaskTensors(NamedTuple):
    """A mask as flex_attention takes it, and the tensors that it reads."""

    blocks: Any
    uploads: Uploads


class FlexForward:
    """The forward of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.shape = replace(problem, mask=FULL if problem.mask.tiles is None else every_tile(problem))
        self._masks: dict[torch.device, MaskTensors] = {}
        cap = problem.features.softcap
        self.how: dict[str, Any] = {
            "score_mod": capped(cap) if cap else None,
            "scale": problem.softmax_scale,
            "enable_gqa": problem.group > 1,
            "kernel_options": CELL_OPTIONS if has_small_cells(problem) else OPTIONS,
        }

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras | None = None) -> tuple[Tensor, Tensor]:
        mask = self._masks.get(q.device)
        if mask is None:
            mask = self._masks[q.device] = block_mask(self.problem, q.device)
        mask.uploads.used()
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        with torch.no_grad():
            out, lse = compiled(self.shape)(*heads_first, block_mask=mask.blocks, **self.how)
        if self.problem.features.sinks:
            out, lse = with_sinks(out, lse, sinks_of(extras))
        return out.transpose(1, 2).contiguous(), lse.contiguous()


def run(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """flex_attention with out and lse as its result."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    out, aux = flex_attention(q, k, v, **how, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@lru_cache(maxsize=256)  # nothing tells the bytes of compiled code
def compiled(shape: Problem) -> Callable[..., tuple[Tensor, Tensor]]:
    """`run`, compiled for problems that differ from `shape` in their masks alone.

    Code that fits all shapes would be made after a few shapes, and a sequence could then have other bits than before.
    torch compiles a function only for a few shapes, so each shape has a function of its own.
    """
    own = FunctionType(run.__code__.replace(), globals(), run.__name__)
    return torch.compile(own, dynamic=False, fullgraph=True, backend=COMPILER)


def capped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out (batch, heads, seqlen, dim) and lse with one more score for each head, which has no value.

    out is rounded to its type once more. The error of out grows by at most half of its last digit.
    """
    both = torch.logaddexp(lse, sinks[:, None])
    return (out * (lse - both).exp().unsqueeze(-1)).to(out.dtype), both


def every_tile(problem: Problem) -> Mask:
    """A mask that allows every tile."""
    given = problem.mask.tiles
    assert given is not None
    return tiles(np.ones_like(given.cells()), given.cell_m, given.cell_n)


def has_small_cells(problem: Problem) -> bool:
    """Whether blocks alone do not say which cells of the mask are allowed."""
    grid = problem.mask.tiles
    return grid is not None and bool(grid.cell_m % BLOCK or grid.cell_n % BLOCK)


def block_mask(problem: Problem, device: torch.device) -> MaskTensors:
    """The mask for all batch entries and heads."""
    from torch.nn.attention.flex_attention import BlockMask

    grid = problem.mask.tiles if has_small_cells(problem) else None
    rows = problem.mask.intervals(problem.len_q, problem.len_k)
    cells = [] if grid is None else [grid.cells().astype(np.int32)]
    first, end, *given = joined([*(x.astype(np.int32) for x in rows), *cells], device)
    partial_count, partial, full_count, full = joined([x[None, None] for x in blocks_of(problem)], device)

    def in_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= first[q]) & (k < end[q])

    def in_row_and_cell(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return in_row(b, h, q, k) & (given[0][q // cell_m, k // cell_n] != 0)

    cell_m, cell_n = (grid.cell_m, grid.cell_n) if grid is not None else (1, 1)
    blocks = BlockMask.from_kv_blocks(
        partial_count,
        partial,
        full_count,
        full,
        BLOCK_SIZE=BLOCK,
        mask_mod=in_row if grid is None else in_row_and_cell,
        seq_lengths=(problem.len_q, problem.len_k),
    )
    return MaskTensors(blocks, Uploads(first, partial))


def blocks_of(problem: Problem) -> Blocks:
    """The blocks of a mask. A block that every query of it sees whole needs no look at single rows."""
    len_q, len_k = problem.len_q, problem.len_k
    n_q, n_k = -(-len_q // BLOCK), -(-len_k // BLOCK)
    lo, hi = problem.mask.intervals(len_q, len_k)
    key = np.arange(n_k) * BLOCK
    key_end = np.minimum(key + BLOCK, len_k)
    some, whole = np.zeros((n_q, n_k), bool), np.ones((n_q, n_k), bool)
    for block in range(n_q):
        a, b = (x[block * BLOCK : (block + 1) * BLOCK, None] for x in (lo, hi))
        some[block] = ((a < key_end) & (b > key) & (a < b)).any(0)
        whole[block] = ((a <= key) & (b >= key_end)).all(0)
    if problem.mask.tiles is not None:
        allowed = _cells_of_blocks(problem, n_q, n_k)
        some, whole = some & allowed.any, whole & allowed.all
    whole &= some
    return Blocks(*_listed(some & ~whole), *_listed(whole))


class _Allowed(NamedTuple):
    any: npt.NDArray[np.bool_]
    all: npt.NDArray[np.bool_]


def _cells_of_blocks(problem: Problem, n_q: int, n_k: int) -> _Allowed:
    """Whether any, and whether all, of the tiles that a block touches are allowed."""
    grid = problem.mask.tiles
    assert grid is not None
    sums = np.zeros(tuple(n + 1 for n in grid.cells().shape), np.int64)
    sums[1:, 1:] = grid.cells().cumsum(0).cumsum(1)

    def ranges(count: int, length: int, cell: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        begin = np.arange(count) * BLOCK
        return begin // cell, -(-np.minimum(begin + BLOCK, length) // cell)

    (top, bottom), (left, right) = ranges(n_q, problem.len_q, grid.cell_m), ranges(n_k, problem.len_k, grid.cell_n)
    count = (
        sums[bottom[:, None], right]
        - sums[top[:, None], right]
        - sums[bottom[:, None], left]
        + sums[top[:, None], left]
    )
    return _Allowed(count > 0, count == (bottom - top)[:, None] * (right - left))


def _listed(marks: npt.NDArray[np.bool_]) -> tuple[Whole, Whole]:
    """How many marks each row has, and their columns."""
    count = marks.sum(1)
    order = np.argsort(~marks, axis=1, kind="stable")
    columns = np.where(np.arange(marks.shape[1]) < count[:, None], order, 0)
    return count.astype(np.int32), columns.astype(np.int32)


def refuses(problem: Problem) -> str | None:
    """Why flex_attention cannot run a problem; None if it can."""
    if problem.is_packed:
        # Its blocks begin at the start of the pack, so the bits of a document would follow from its place.
        return "flex_attention gives a document other bits in another pack"
    if problem.dim < LEAST_DIM:
        return f"flex_attention takes head dims from {LEAST_DIM} on, not {problem.dim}"
    if not math.prod((problem.len_q, problem.len_k)):
        return "flex_attention wants queries and keys"
    return None
