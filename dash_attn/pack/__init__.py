"""Packs: problems of several sequences, each of which is planned by itself."""

from dash_attn.pack.assembly import assemble
from dash_attn.pack.checks import AssemblyError, check
from dash_attn.pack.pack import Pack, Planned
from dash_attn.pack.tables import Assembly, Doc, PackedChain, Sizes

__all__ = ["Assembly", "AssemblyError", "Doc", "Pack", "PackedChain", "Planned", "Sizes", "assemble", "check"]
