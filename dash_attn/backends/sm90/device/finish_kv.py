"""The kernel after the main one, if chains are cut: rounds the fp32 sums of dV and of dK, scaled, to 16 bits.

With panels each panel has sums of its own. The kernel first adds them, in fp32 and in the order of the table `parts`.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cu
import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from dash_attn.pack import Fold, Part

from ..config import KernelConfig
from ..cta import CONSUMER_WARPGROUPS, TILE_N
from .finish import Corner, rows_of, store_rounded
from .rows import batched

THREADS = 128


class KvGrads(NamedTuple):
    dv: Any
    dk: Any


class KvTables(NamedTuple):
    """Each is a tuple of one table, or empty."""

    rows: Any  # of the kv tiles of a pack; with panels the table `folds`
    parts: Any  # with panels


class ThreadShare(NamedTuple):
    """What a thread works on: two rows of one part of a tile's sum."""

    plane: Any
    tile: Any  # with panels the row of `folds`
    part: Any
    wg: Any
    thread: Any
    row: Any  # the first of its two rows in the tile


class FinishKv:
    def __init__(self, cfg: KernelConfig):
        self.cfg = cfg

    @cute.jit
    def __call__(self, sums: cute.Tensor, grads: tuple, tiles: tuple, scale: Float32, stream: cu.CUstream):
        """sums: (kv planes, kv tiles, cfg.chain_entries, 2 * cfg.half_floats)
        grads: dv and dk
        tiles: rows of the kv tiles of a pack; with panels the tables `folds` and `parts`
        """
        grads, tables = KvGrads(*(batched(self.cfg, grad) for grad in grads)), KvTables(tiles[:1], tiles[1:])
        batch, _, heads, _ = grads.dv.shape
        count = tables.rows[0].shape[0] if const_expr(len(tables.parts) > 0) else sums.shape[1]
        pieces = count * self.cfg.chain_entries * CONSUMER_WARPGROUPS
        self.kernel(sums, grads, tables, scale).launch(
            grid=[pieces, heads, batch], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, grads: KvGrads, tables: KvTables, scale: Float32):
        """One CTA works on 64 columns of one warpgroup's rows of a dV or dK tile."""
        cfg = self.cfg
        at, head, batch = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        wg, entry = at % CONSUMER_WARPGROUPS, at // CONSUMER_WARPGROUPS
        tile, part = entry // cfg.chain_entries, entry % cfg.chain_entries
        plane = batch * grads.dv.shape[2] + head
        local = wg * 64 + (thread // 32) * 16 + (thread % 32) // 4  # the first of this thread's two rows in the tile
        share = ThreadShare(plane, tile, part, wg, thread, local)
        if const_expr(len(tables.parts) > 0):
            mine = self.folded(sums, tables.rows[0], tables.parts[0], share)
        else:
            mine = self.load(sums, share)
        first, end = rows_of(cfg, tables.rows, tile, TILE_N, grads.dv.shape[1])
        row = first + local
        col = (part % cfg.part_entries) * 64 + (thread % 4) * 8
        if part < cfg.part_entries:
            store_rounded(cfg, mine, Corner(grads.dv, batch, head, row, end, col), Float32(1.0))
        else:
            store_rounded(cfg, mine, Corner(grads.dk, batch, head, row, end, col), scale)

    def load(self, sums, share: ThreadShare):
        """This thread's sums, in fragment order: (4, pieces). The last two of four belong to the row 8 below."""
        cfg = self.cfg
        offset = cute.assume(share.wg * cfg.half_floats + share.thread * 4, divby=4)
        layout = cute.make_layout((4, cfg.half_floats // 512), stride=(1, 512))
        mine = cute.make_rmem_tensor(layout.shape, Float32)
        begin = sums[share.plane, share.tile, share.part, None].iterator + offset
        cute.autovec_copy(cute.make_tensor(begin.align(16), layout), mine)
        return mine

    @cute.jit
    def folded(self, sums, folds, parts, share: ThreadShare):
        """The sums of all panels. A row that a panel does not have keeps its sum: what lies there is not its own."""
        begin, count = folds[share.tile, int(Fold.PART)], folds[share.tile, int(Fold.PARTS)]
        total = self.load(sums, share._replace(tile=parts[begin, int(Part.KV_TILE)]))
        for at in cutlass.range(begin + 1, begin + count, unroll=1):
            more = self.load(sums, share._replace(tile=parts[at, int(Part.KV_TILE)]))
            rows = parts[at, int(Part.K_ROWS)]
            for h in cutlass.range_constexpr(2):
                if share.row + 8 * h < rows:
                    for j in cutlass.range_constexpr(cute.size(total.shape[1])):
                        for i in cutlass.range_constexpr(2):
                            total[2 * h + i, j] = total[2 * h + i, j] + more[2 * h + i, j]
        return total
