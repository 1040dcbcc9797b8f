"""Tiles of rows in global memory, as TMA addresses them.

In a batch a tile has the coordinates tile number, head and batch entry. In a pack a tile begins at any row, and must
not reach into the next sequence. So the descriptor of a pack's tensor has FAR rows, begins FAR rows before the tensor,
and has a dimension `shift` in place of the batch. A step of `shift` is one row. Row r of a sequence of n rows that
begins at row `first` of the tensor has the coordinates

    row = FAR - n + r,  shift = first + n

The rows r = n, n + 1, ... have coordinates outside of the FAR rows. TMA loads zeros for them and does not store them.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int64, const_expr

from ..config import KernelConfig

FAR = 1 << 30


class Coords(NamedTuple):
    """Where a tile lies in a described tensor."""

    row: Any  # in a batch counted in tiles
    column: Any  # counted in tiles
    head: Any
    last: Any  # batch entry, in a pack the shift


def batched(cfg: KernelConfig, t):
    """A tensor with a batch mode. Tensors of a pack come without one."""
    if const_expr(not cfg.packed):
        return t
    return cute.make_tensor(t.iterator, cute.make_layout((1, *t.shape), stride=(0, *t.stride)))


def described(cfg: KernelConfig, t):
    """A view of a tensor (batch, rows, heads, dim) with the tiled modes first: (rows, dim, heads, batch or shift)."""
    if const_expr(not cfg.packed):
        return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))
    row = Int64(t.stride[1])
    base = (t.iterator - row * FAR).align(16)
    return cute.make_tensor(
        base, cute.make_layout((FAR, t.shape[3], t.shape[2], FAR), stride=(row, 1, Int64(t.stride[2]), row))
    )


def tile_at(cfg: KernelConfig, tensor, smem, coords: Coords):
    """The tile of a described tensor that a tensor in shared memory holds."""
    shape = (cute.size(smem, mode=[0]), cute.size(smem, mode=[1]))
    if const_expr(cfg.packed):
        tensor, coords = cute.domain_offset((coords.row, 0, 0, 0), tensor), coords._replace(row=0)
    return cute.group_modes(cute.local_tile(tensor, shape, coords), 0, 2)
