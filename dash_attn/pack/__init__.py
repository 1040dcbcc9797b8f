"""Packs: problems of several sequences or panels. Each of them is planned by itself.

pack               the problem and its plans
templates          verified orders, one for each kind of sequence
assembly, tables   the tables of a pack, made of templates
rounds             when the bundles of a pack start
folds              which sums of panels are added
checks             what holds for the tables of every pack
"""

from dash_attn.pack.assembly import assemble
from dash_attn.pack.checks import AssemblyError, check
from dash_attn.pack.pack import Pack, Planned
from dash_attn.pack.tables import Assembly, Doc, Fold, PackedBundle, PackedChain, Part, Round, Sizes, TileRows
from dash_attn.pack.templates import Fact, needed_workers

__all__ = [
    "Assembly",
    "AssemblyError",
    "Doc",
    "Fact",
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
    "needed_workers",
]
