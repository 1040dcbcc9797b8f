"""Masks and problems: everything that fixes the mathematical answer."""

from dash_attn.problem.features import PLAIN, Features
from dash_attn.problem.mask import (
    CAUSAL,
    FULL,
    Documents,
    Mask,
    TileMask,
    documents,
    intervals,
    intervals_by_row,
    tiles,
    window,
)
from dash_attn.problem.panels import Panel, SequenceColumn
from dash_attn.problem.problem import Origin, Problem, Sequence
from dash_attn.problem.rows import RowIntervals

__all__ = [
    "CAUSAL",
    "FULL",
    "PLAIN",
    "Documents",
    "Features",
    "Mask",
    "Origin",
    "Panel",
    "Problem",
    "RowIntervals",
    "Sequence",
    "SequenceColumn",
    "TileMask",
    "documents",
    "intervals",
    "intervals_by_row",
    "tiles",
    "window",
]
