"""Packs: problems of several sequences. Each sequence is planned by itself."""

from dash_attn.pack.assembly import assemble
from dash_attn.pack.checks import AssemblyError, check
from dash_attn.pack.pack import Pack, Planned
from dash_attn.pack.tables import Assembly, Doc, Fold, PackedBundle, PackedChain, Part, Round, Sizes, TileRows

__all__ = [
    "Assembly",
    "AssemblyError",
    "Doc",
    "Fold",
    "Pack",
    "PackedBundle",
    "PackedChain",
    "Part",
    "Planned",
    "Round",
    "Sizes",
    "TileRows",
    "assemble",
    "check",
]
