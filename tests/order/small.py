"""Small tilings, and templates as lists."""

from __future__ import annotations

from itertools import pairwise

from dash_attn.order import Template
from dash_attn.problem import Mask, Problem
from dash_attn.tiling import TileShape, Tiling, tile


def square(n: int, mask: Mask, group: int = 1, heads_kv: int = 1) -> Tiling:
    """One tile a token: n x n tiles."""
    return tile(Problem(1, heads_kv * group, heads_kv, n, n, mask=mask), TileShape(1, 1))


def chains(template: Template) -> list[list[tuple[int, int, int]]]:
    """(head, q tile, turn) of each visit of each chain."""
    rows = list(zip(template.head.tolist(), template.q.tolist(), template.turn.tolist(), strict=True))
    return [rows[a:b] for a, b in pairwise(template.first.tolist())]
