"""The score matrix cut into tiles."""

from dash_attn.tiling.tiling import Span, TileShape, TileState, Tiling, grid, tile

__all__ = ["Span", "TileShape", "TileState", "Tiling", "grid", "tile"]
