"""The kernel behind a main kernel of cut chains: adds the fp32 parts of dV and dK, q head after q head of a group."""

import cuda.bindings.driver as cu
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..config import KernelConfig
from ..cta import CONSUMER_WARPGROUPS, TILE_N
from .finish import store_rounded

THREADS = 128


class AddParts:
    def __init__(self, cfg: KernelConfig):
        self.cfg = cfg

    @cute.jit
    def __call__(self, parts: cute.Tensor, grads: tuple, scale: Float32, stream: cu.CUstream):
        """parts: (planes of q heads, kv tiles, cfg.chain_entries, 2 * cfg.half_floats)
        grads: dv and dk
        """
        batch, _, heads, _ = grads[0].shape
        pieces = parts.shape[1] * self.cfg.chain_entries * CONSUMER_WARPGROUPS
        self.kernel(parts, grads, scale).launch(grid=[pieces, heads, batch], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, parts: cute.Tensor, grads: tuple, scale: Float32):
        """One CTA works on 64 columns of one warpgroup's rows of a dV or dK tile."""
        cfg = self.cfg
        at, head, batch = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        wg, entry = at % CONSUMER_WARPGROUPS, at // CONSUMER_WARPGROUPS
        tile, part = entry // cfg.chain_entries, entry % cfg.chain_entries
        heads = grads[0].shape[2]
        group = parts.shape[0] // (grads[0].shape[0] * heads)
        plane = (batch * heads + head) * group
        offset = cute.assume(wg * cfg.half_floats + thread * 4, divby=4)
        layout = cute.make_layout((4, cfg.half_floats // 512), stride=(1, 512))
        sums, more = (cute.make_rmem_tensor(layout.shape, Float32) for _ in range(2))
        cute.autovec_copy(cute.make_tensor((parts[plane, tile, part, None].iterator + offset).align(16), layout), sums)
        for i in cutlass.range(1, group, unroll=1):
            src = parts[plane + i, tile, part, None].iterator + offset
            cute.autovec_copy(cute.make_tensor(src.align(16), layout), more)
            for j in cutlass.range_constexpr(cute.size(sums)):
                sums[j] = sums[j] + more[j]
        row = tile * TILE_N + wg * 64 + (thread // 32) * 16 + (thread % 32) // 4
        col = (part % cfg.part_entries) * 64 + (thread % 4) * 8
        if part < cfg.part_entries:
            store_rounded(cfg, sums, (grads[0], batch, head), (row, col), Float32(1.0))
        else:
            store_rounded(cfg, sums, (grads[1], batch, head), (row, col), scale)
