"""After the main kernel, where no contributor finishes dQ: fp32 sums in fragment order -> scaled 16-bit dQ."""

import cuda.bindings.driver as cu
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .bundles import element
from .config import KernelConfig

THREADS = 128


class Finish:
    def __init__(self, cfg: KernelConfig):
        self.cfg = cfg

    @cute.jit
    def __call__(self, dq_sum: cute.Tensor, dq: cute.Tensor, scale: Float32, stream: cu.CUstream):
        batch, _, heads, _ = dq.shape
        self.kernel(dq_sum, dq, scale).launch(
            grid=[dq_sum.shape[1], heads, batch * 2], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, dq_sum: cute.Tensor, dq: cute.Tensor, scale: Float32):
        """One CTA per warpgroup's part of a tile; piece j of thread t: columns 8j + 2 (t % 4) + {0, 1} of two rows."""
        cfg = self.cfg
        tile, head, z = cute.arch.block_idx()
        batch, half = z // 2, z % 2
        thread = cute.arch.thread_idx()[0]
        plane = batch * dq.shape[2] + head
        row = tile * cfg.tile_m + (thread // 32) * 16 + (thread % 32) // 4
        col = (thread % 4) * 2
        if cutlass.const_expr(cfg.dq_split_rows):
            row = row + half * 64
        else:
            col = col + half * 64
        src = dq_sum[plane, tile, half, None].iterator + cute.assume(thread * 4, divby=4)
        pieces = cute.make_tensor(src.align(16), cute.make_layout((4, cfg.half_floats // 512), stride=(1, 512)))
        sums = cute.make_rmem_tensor(pieces.shape, Float32)
        cute.autovec_copy(pieces, sums)
        for h in cutlass.range_constexpr(2):
            if row + 8 * h < dq.shape[1]:
                line = dq[batch, row + 8 * h, head, None]
                for j in cutlass.range_constexpr(cute.size(sums.shape[1])):
                    if cutlass.const_expr(cfg.head_dim == 0):
                        self.store(sums[None, j], h, (line, col + 8 * j), scale)
                    else:
                        if col + 8 * j < cfg.head_dim:
                            self.store(sums[None, j], h, (line, col + 8 * j), scale)

    def store(self, piece, h, where, scale):
        line, col = where
        pair = cute.make_rmem_tensor(2, element(self.cfg))
        for c in range(2):
            pair[c] = (piece[2 * h + c] * scale).to(element(self.cfg))
        at = (line.iterator + cute.assume(col, divby=2)).align(4)
        cute.autovec_copy(pair, cute.make_tensor(at, cute.make_layout(2)))
