"""The kernel before a forward of packed sequences: copies K and V, with room behind every sequence for whole tiles.

A forward multiplies whole tiles. The probabilities behind the end of a sequence are 0, but 0 * NaN is NaN: the values
of the next sequence would reach this one. In the copy, zeros are there.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cu
import cutlass
import cutlass.cute as cute

from ..config import PIECE_ROWS, KernelConfig, Piece

THREADS = 256


class KeysValues(NamedTuple):
    k: Any
    v: Any


class Spread:
    def __init__(self, cfg: KernelConfig):
        self.cfg = cfg

    @cute.jit
    def __call__(self, sources: tuple, copies: tuple, pieces: cute.Tensor, stream: cu.CUstream):
        """sources, copies: k and v, (rows, heads, dim)
        pieces: columns of config.Piece
        """
        sources, copies = KeysValues(*sources), KeysValues(*copies)
        grid = [pieces.shape[0] * len(sources), sources.k.shape[1], 1]
        self.kernel(sources, copies, pieces).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, sources: KeysValues, copies: KeysValues, pieces: cute.Tensor):
        at, head, _ = cute.arch.block_idx()
        if at < pieces.shape[0]:
            self.copy(sources.k, copies.k, head, pieces, at)
        else:
            self.copy(sources.v, copies.v, head, pieces, at - pieces.shape[0])

    @cute.jit
    def copy(self, source, copy, head, pieces, at):
        first, filled = pieces[at, int(Piece.SOURCE)], pieces[at, int(Piece.FILLED)]
        to, rows = pieces[at, int(Piece.COPY)], pieces[at, int(Piece.ROWS)]
        width = self.cfg.columns // 8  # a thread copies 16 bytes at a time
        for i in cutlass.range_constexpr(-(-PIECE_ROWS * width // THREADS)):
            unit = i * THREADS + cute.arch.thread_idx()[0]
            row = unit // width
            if row < rows:
                values = cute.make_rmem_tensor(8, source.element_type)
                values.fill(0.0)
                if row < filled:
                    cute.autovec_copy(self.eight(source, first + row, head, unit % width), values)
                cute.autovec_copy(values, self.eight(copy, to + row, head, unit % width))

    def eight(self, tensor, row, head, piece):
        start = tensor[row, head, None].iterator + cute.assume(piece * 8, divby=8)
        return cute.make_tensor(start.align(16), cute.make_layout(8))
