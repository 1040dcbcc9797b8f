"""The tile shape of the CPU. It follows from the problem alone, because the tile shape changes the bits."""

from __future__ import annotations

import math

from dash_attn.problem import Problem
from dash_attn.tiling import TileShape

# A large tile makes the interpreter's share of a task small. A small tile keeps the scores in the cache and has fewer
# masked pairs. These sizes are the fastest on tensors (2, 2048, 8, 64). Rows that see LONG keys get the larger tile.
LONG = 2048
SIDE, LONG_SIDE = 256, 512


def tile_shape(problem: Problem) -> TileShape:
    """512x512 if rows see many keys, else 256x256. With a tile mask, the nearest size that divides its cells."""
    first, end = problem.mask.intervals(problem.len_q, problem.len_k)
    side = LONG_SIDE if (end - first).max(initial=0) >= LONG else SIDE
    cells = problem.mask.tiles
    return TileShape(side, side) if cells is None else TileShape(_near(cells.cell_m, side), _near(cells.cell_n, side))


def _near(cell: int, side: int) -> int:
    divisors = [d for d in range(1, cell + 1) if cell % d == 0]
    return min(divisors, key=lambda divisor: abs(math.log(divisor / side)))
