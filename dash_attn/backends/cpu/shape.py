"""The tile shape of the CPU. It follows from the problem alone, because the tile shape changes the bits."""

from __future__ import annotations

import math

from dash_attn.problem import Problem
from dash_attn.tiling import TileShape

# A large tile makes the interpreter's share of a task small. A small tile keeps the scores in the cache and has fewer
# masked pairs. These sizes are the fastest on tensors (2, 2048, 8, 64). Rows that see LONG keys get the larger tile.
LONG = 2048
SIDE, LONG_SIDE = 256, 512


# A single cell that has no divisor within this factor of the size is tiled as if there were no tile mask.
FAR = 4


def tile_shape(problem: Problem) -> TileShape:
    """512x512 if rows see many keys, else 256x256. With a tile mask, the nearest size that divides its cells."""
    first, end = problem.mask.intervals(problem.len_q, problem.len_k)
    side = LONG_SIDE if (end - first).max(initial=0) >= LONG else SIDE
    cells = problem.mask.tiles
    if cells is None:
        return TileShape(side, side)
    return TileShape(_near(cells.cell_m, problem.len_q, side), _near(cells.cell_n, problem.len_k, side))


def _near(cell: int, length: int, side: int) -> int:
    # A larger divisor is no nearer to `side` than 1 is.
    divisors = [d for d in range(1, min(cell, side * side) + 1) if cell % d == 0]
    nearest = min(divisors, key=lambda divisor: abs(math.log(divisor / side)))
    # One cell holds all tokens, so any size fits. A far size costs memory, or makes many small tiles.
    is_far = nearest > FAR * side or nearest < min(length, side // FAR)
    return side if cell >= length and is_far else nearest
