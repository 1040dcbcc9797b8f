"""The kernel before the main one: delta = rowsum(dO * O), LSE in base 2, and counters set to zero.

If there is a gradient of LSE, delta is that much smaller: dS = P * (dP - rowsum(dO * O) + dLSE). The main kernel has no
part in it.

The counters are the turnstiles of dQ, the ticket counter of a pack, and the turnstiles of dV and dK if chains are cut.
One CTA works on a q tile of one head and batch. Neighbouring CTAs have neighbouring heads, as in memory. Rows past the
end of the sequence get LSE = +inf, so their P is 0.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cu
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..config import LOG2_E, KernelConfig
from .finish import rows_of
from .rows import batched

THREADS = 256


class Inputs(NamedTuple):
    dout: Any
    out: Any
    lse: Any
    dlse: Any = ()


class Outputs(NamedTuple):
    lse2: Any
    delta: Any
    counters: Any


class PackExtra(NamedTuple):
    words: Any  # to be set to zero
    tiles: Any  # a tuple of the rows of the q tiles, or an empty one


class Prepare:
    def __init__(self, cfg: KernelConfig, with_dlse: bool = False):
        self.cfg, self.with_dlse = cfg, with_dlse

    @cute.jit
    def __call__(self, inputs: tuple, stats: tuple, extra: tuple, stream: cu.CUstream):
        """inputs: dout and out (batch, seqlen, heads, dim), lse (batch, heads, seqlen) and perhaps dlse like it; in a
        pack without batch
        stats: those of workspace.Workspace; dq_sum is left alone
        extra: `words` of a pack or of cut chains, which are set to zero; then rows of the q tiles of a pack
        """
        inputs = Inputs(*(batched(self.cfg, t) for t in inputs))
        batch, _, heads, _ = inputs.dout.shape
        lse2, delta, _, counters = stats
        grid = [heads * counters.shape[1], batch, 1]
        extra = PackExtra(extra[0] if cutlass.const_expr(len(extra) > 0) else (), extra[1:])
        self.kernel(inputs, Outputs(lse2, delta, counters), extra).launch(
            grid=grid, block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, inputs: Inputs, outputs: Outputs, extra: PackExtra):
        cfg = self.cfg
        dout, counters = inputs.dout, outputs.counters
        at, batch, _ = cute.arch.block_idx()
        tile, head = at // dout.shape[2], at % dout.shape[2]
        thread = cute.arch.thread_idx()[0]
        plane = batch * dout.shape[2] + head
        if cutlass.const_expr(cfg.cut or cfg.packed):
            clear(extra.words, thread)
        first, end = rows_of(cfg, extra.tiles, tile, cfg.tile_m, dout.shape[1])
        if thread < counters.shape[2]:
            counters[plane, tile, thread, 0] = Int32(0)
        lanes, pieces = cfg.dim // 8, cfg.columns // 8  # a lane reads 16 bytes of a row; the sum needs 2^n lanes
        piece, mine = thread % lanes, thread // lanes
        passes, step = cfg.tile_m * lanes // THREADS, THREADS // lanes
        # All loads are issued before the first use. Rows past the end read the last row, and their values are dropped.
        rows = [first + mine + i * step for i in range(passes)]
        clipped = [cutlass.min(row, end - 1) for row in rows]
        piece_read = piece if pieces == lanes else cutlass.min(piece, pieces - 1)
        logs = [inputs.lse[batch, head, row] * LOG2_E for row in clipped]
        if cutlass.const_expr(self.with_dlse):
            dlogs = [inputs.dlse[batch, head, row] for row in clipped]
        pairs = [[self.load(t[batch, row, head, None], piece_read) for t in (dout, inputs.out)] for row in clipped]
        for i in cutlass.range_constexpr(passes):
            row = rows[i]
            part = dot(*pairs[i])
            if cutlass.const_expr(pieces < lanes):
                part = part if piece < pieces else Float32(0.0)
            total = cute.arch.warp_reduction_sum(part, threads_in_group=lanes)
            if cutlass.const_expr(self.with_dlse):
                # The LSE of a row that sees no key follows from no score, whatever its gradient is.
                total = total - (dlogs[i] if logs[i] != -Float32.inf else Float32(0.0))
            if piece == 0:
                # A row that sees no key has LSE = -inf, which would make its P infinite. Its P is masked later.
                value = logs[i] if logs[i] != -Float32.inf else Float32(0.0)
                at = tile * cfg.tile_m + mine + i * step
                outputs.lse2[plane, at] = value if row < end else Float32.inf
                outputs.delta[plane, at] = total if row < end else Float32(0.0)

    def load(self, line, piece):
        src = cute.make_tensor((line.iterator + cute.assume(piece * 8, divby=8)).align(16), cute.make_layout(8))
        out = cute.make_rmem_tensor(8, line.element_type)
        cute.autovec_copy(src, out)
        return out


@cute.jit
def clear(words, thread):
    """Sets `words` to zero, each thread of the grid a few of them."""
    x, y, _ = cute.arch.block_idx()
    width, height, _ = cute.arch.grid_dim()
    for at in cutlass.range((y * width + x) * THREADS + thread, words.shape[0], width * height * THREADS, unroll=1):
        words[at] = Int32(0)


def dot(a, b):
    product = a.load().to(Float32) * b.load().to(Float32)
    return product.reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)
