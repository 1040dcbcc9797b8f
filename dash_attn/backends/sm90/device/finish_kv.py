"""The kernel after the main one, if chains are cut: rounds the fp32 sums of dV and of dK, scaled, to 16 bits."""

import cuda.bindings.driver as cu
import cutlass.cute as cute
from cutlass import Float32

from ..config import KernelConfig
from ..cta import CONSUMER_WARPGROUPS, TILE_N
from .finish import rows_of, store_rounded

THREADS = 128


class FinishKv:
    def __init__(self, cfg: KernelConfig):
        self.cfg = cfg

    @cute.jit
    def __call__(self, sums: cute.Tensor, grads: tuple, tiles: tuple, scale: Float32, stream: cu.CUstream):
        """sums: (kv planes, kv tiles, cfg.chain_entries, 2 * cfg.half_floats)
        grads: dv and dk
        tiles: rows of the kv tiles of a pack
        """
        batch, _, heads, _ = grads[0].shape
        pieces = sums.shape[1] * self.cfg.chain_entries * CONSUMER_WARPGROUPS
        self.kernel(sums, grads, tiles, scale).launch(grid=[pieces, heads, batch], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, sums: cute.Tensor, grads: tuple, tiles: tuple, scale: Float32):
        """One CTA works on 64 columns of one warpgroup's rows of a dV or dK tile."""
        cfg = self.cfg
        at, head, batch = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        wg, entry = at % CONSUMER_WARPGROUPS, at // CONSUMER_WARPGROUPS
        tile, part = entry // cfg.chain_entries, entry % cfg.chain_entries
        plane = batch * grads[0].shape[2] + head
        offset = cute.assume(wg * cfg.half_floats + thread * 4, divby=4)
        layout = cute.make_layout((4, cfg.half_floats // 512), stride=(1, 512))
        mine = cute.make_rmem_tensor(layout.shape, Float32)
        cute.autovec_copy(cute.make_tensor((sums[plane, tile, part, None].iterator + offset).align(16), layout), mine)
        first, end = rows_of(cfg, tiles, tile, TILE_N, grads[0].shape[1])
        row = first + wg * 64 + (thread // 32) * 16 + (thread % 32) // 4
        col = (part % cfg.part_entries) * 64 + (thread % 4) * 8
        if part < cfg.part_entries:
            store_rounded(cfg, mine, (grads[0], batch, head), (row, end, col), Float32(1.0))
        else:
            store_rounded(cfg, mine, (grads[1], batch, head), (row, end, col), scale)
