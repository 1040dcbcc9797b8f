"""The CPU's tile: a function of the problem alone, because the tile is part of what fixes the bits."""

from __future__ import annotations

import math

from dash_attn.problem import Problem
from dash_attn.tiling import TileShape

# A visit must be long beside the interpreter's share in it, and its scores should stay in the cache: measured best on
# (2, 2048, 8, 64). Rows that see fewer keys than LONG would waste the larger tile on masked pairs.
LONG = 2048
SIDE, LONG_SIDE = 256, 512


def tile_shape(problem: Problem) -> TileShape:
    """512x512 where rows see many keys, else 256x256; in a tile mask the divisor of its cells that comes nearest."""
    first, end = problem.mask.intervals(problem.len_q, problem.len_k)
    side = LONG_SIDE if (end - first).max(initial=0) >= LONG else SIDE
    cells = problem.mask.tiles
    return TileShape(side, side) if cells is None else TileShape(_near(cells.cell_m, side), _near(cells.cell_n, side))


def _near(cell: int, side: int) -> int:
    divisors = [d for d in range(1, cell + 1) if cell % d == 0]
    return min(divisors, key=lambda divisor: abs(math.log(divisor / side)))
