"""Masks and problems."""

from dash_attn.problem.mask import CAUSAL, FULL, Documents, Mask, TileMask, documents, tiles, window
from dash_attn.problem.panels import Panel
from dash_attn.problem.problem import Problem, Sequence

__all__ = [
    "CAUSAL",
    "FULL",
    "Documents",
    "Mask",
    "Panel",
    "Problem",
    "Sequence",
    "TileMask",
    "documents",
    "tiles",
    "window",
]
