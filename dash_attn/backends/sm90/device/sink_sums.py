"""The kernel between `prepare` and the main one, if sinks need a gradient: their sums over all rows.

The gradient of a sink is the sum over its head's rows of exp(sink - LSE) * -delta. `prepare` has written both, and
delta includes the gradient of LSE. Rows past the end of a sequence have LSE = +inf and delta = 0, so they add 0.
"""

import cuda.bindings.driver as cu
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..config import LOG2_E, KernelConfig

THREADS = 1024
WARPS = THREADS // 32


class SinkSums:
    def __init__(self, cfg: KernelConfig):
        self.cfg = cfg

    @cute.jit
    def __call__(self, stats: tuple, sinks: cute.Tensor, dsinks: cute.Tensor, stream: cu.CUstream):
        """stats: those of workspace.Workspace, after `prepare`
        sinks, dsinks: (heads)
        """
        lse2, delta, *_ = stats
        grid = [sinks.shape[0], 1, 1]
        self.kernel(lse2, delta, sinks, dsinks).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, lse2: cute.Tensor, delta: cute.Tensor, sinks: cute.Tensor, dsinks: cute.Tensor):
        """One CTA works on a head. Which rows a thread adds, and in which order, follows from the shapes alone."""
        head, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        sink = sinks[head] * LOG2_E
        total = Float32(0.0)
        for plane in cutlass.range(head, lse2.shape[0], sinks.shape[0], unroll=1):
            for at in cutlass.range(thread, lse2.shape[1], THREADS, unroll=4):
                total -= cute.math.exp2(sink - lse2[plane, at], fastmath=True) * delta[plane, at]
        sums = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)
        total = cute.arch.warp_reduction_sum(total)
        if thread % 32 == 0:
            sums[thread // 32] = total
        cute.arch.sync_threads()
        if thread < 32:
            total = cute.arch.warp_reduction_sum(sums[thread])
            if thread == 0:
                dsinks[head] = total
