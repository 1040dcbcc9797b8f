"""The score matrix cut into tiles."""

from dash_attn.tiling.tiling import TileShape, TileState, Tiling, grid, tile

__all__ = ["TileShape", "TileState", "Tiling", "grid", "tile"]
