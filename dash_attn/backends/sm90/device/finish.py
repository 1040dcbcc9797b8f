"""The kernel after the main one, if finish is "postpass": scales the fp32 sums of dQ and rounds them to 16 bits."""

from typing import Any, NamedTuple

import cuda.bindings.driver as cu
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dash_attn.pack import TileRows

from ..config import KernelConfig
from .bundles import element
from .rows import batched

THREADS = 128


class Corner(NamedTuple):
    """Where a thread stores its sums: in `grad`, from this row and column on."""

    grad: Any
    batch: Any
    head: Any
    row: Any
    end: Any  # the first row that is not stored
    column: Any


class Finish:
    def __init__(self, cfg: KernelConfig):
        self.cfg = cfg

    @cute.jit
    def __call__(self, dq_sum: cute.Tensor, dq: cute.Tensor, tiles: tuple, scale: Float32, stream: cu.CUstream):
        """tiles: rows of the q tiles of a pack"""
        dq = batched(self.cfg, dq)
        batch, _, heads, _ = dq.shape
        self.kernel(dq_sum, dq, tiles, scale).launch(
            grid=[dq_sum.shape[1], heads, batch * 2], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, dq_sum: cute.Tensor, dq: cute.Tensor, tiles: tuple, scale: Float32):
        """One CTA works on one warpgroup's part of a tile.

        Sums lie in fragment order: piece j of thread t has the columns 8j + 2 (t % 4) + {0, 1} of two rows.
        """
        cfg = self.cfg
        tile, head, z = cute.arch.block_idx()
        batch, half = z // 2, z % 2
        thread = cute.arch.thread_idx()[0]
        plane = batch * dq.shape[2] + head
        first, end = rows_of(cfg, tiles, tile, cfg.tile_m, dq.shape[1])
        row = first + (thread // 32) * 16 + (thread % 32) // 4
        first_col = (thread % 4) * 8  # of the eight that this thread stores, after the lanes have exchanged columns
        if cutlass.const_expr(cfg.dq_split_rows):
            row = row + half * 64
        else:
            first_col = first_col + half * 64
        src = dq_sum[plane, tile, None].iterator + cute.assume(half * cfg.sum_parts[0] + thread * 4, divby=4)
        pieces = cute.make_tensor(src.align(16), cute.make_layout((4, cfg.half_floats // 512), stride=(1, 512)))
        sums = cute.make_rmem_tensor(pieces.shape, Float32)
        if cutlass.const_expr(cfg.columns == cfg.dim):
            cute.autovec_copy(pieces, sums)
        else:  # sums have no padding: behind the last column lies another tile
            sums.fill(0.0)
            for j in cutlass.range_constexpr(cute.size(pieces.shape[1])):
                if 512 * j < (cfg.sum_parts[0] if half == 0 else cfg.sum_parts[1]):
                    cute.autovec_copy(pieces[None, j], sums[None, j])
        store_rounded(cfg, sums, Corner(dq, batch, head, row, end, first_col), scale)


def rows_of(cfg, tiles, tile, height: int, length):
    """The first row of a tile, and one past the last row of its sequence or, in a pack, of the tile."""
    if cutlass.const_expr(cfg.packed):
        first = tiles[0][tile, TileRows.FIRST]
        return first, first + tiles[0][tile, TileRows.COUNT]
    return tile * height, length


@cute.jit
def store_rounded(cfg, sums, corner: Corner, scale):
    """Scales a thread's sums, rounds them and stores them."""
    lane = cute.arch.lane_idx() % 4
    half16 = cute.make_rmem_tensor_like(sums, element(cfg))
    half16.store((sums.load() * scale).to(element(cfg)))
    words = cute.recast_tensor(half16, Int32)
    for h in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(0, cute.size(words.shape[1]), 4):
            eight = quad_transpose([words[h, j + k] for k in range(4)], lane)
            col = corner.column + 8 * j
            if corner.row + 8 * h < corner.end and col < cfg.columns:
                line = corner.grad[corner.batch, corner.row + 8 * h, corner.head, None]
                place = (line.iterator + cute.assume(col, divby=8)).align(16)
                cute.autovec_copy(eight, cute.make_tensor(cute.recast_ptr(place, dtype=Int32), cute.make_layout(4)))


@cute.jit
def quad_transpose(words, lane):
    """Transposes the four words of four lanes: lane i gets word i of each lane, which are eight columns of a row."""
    w = cute.make_rmem_tensor(4, Int32)
    for k in cutlass.range_constexpr(4):
        w[k] = words[k]
    for bit in (1, 2):
        for k in (0, 3 - bit):
            low = (lane & bit) == 0
            got = cute.arch.shuffle_sync_bfly(w[k + bit] if low else w[k], bit)
            w[k + bit] = got if low else w[k + bit]
            w[k] = w[k] if low else got
    return w
