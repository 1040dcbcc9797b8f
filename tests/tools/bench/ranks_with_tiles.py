"""Processes of an audit over ranks, with small tiles. An audit starts them by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from dash_attn.tiling import TileShape
from dash_attn.tools.bench.audit import ranks
from tests.distributed.tiles import disordered, tiled

SHAPE = TileShape(3, 16)


def in_order(number: int, *others: Any) -> None:
    with tiled(SHAPE):
        ranks._rank(number, *others)


def out_of_order(number: int, *others: Any) -> None:
    """All processes but the first order their panels by another policy."""
    with tiled(SHAPE), disordered("descending") if number else nullcontext():
        ranks._rank(number, *others)
