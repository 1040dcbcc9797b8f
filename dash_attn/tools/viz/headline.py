"""The picture of the headline: the speed-up in every cell, and its geometric mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dash_attn.tools.bench.headline import Group
from dash_attn.tools.bench.report import Against
from dash_attn.tools.viz.plots import NAMES, OURS, Theme, dressed, finished, new_sheet

COLOURS = {"fa4 det": OURS, "fa4": "#3b8bc4"}
# Rows of the picture are this far below the middle of their group; its name stands above them.
OFFSETS = {"fa4 det": 0.03, "fa4": 0.32}


def headline_plot(groups: Sequence[Group], environment: Mapping[str, Any], theme: Theme) -> Figure:
    """A dot for each cell, a bar at the geometric mean; two rows for each group."""
    with matplotlib.rc_context({"text.parse_math": False}):
        sheet = new_sheet({"environment": environment}, theme, 1, "Speed of ours over that of FlashAttention-4")
        (ax,) = sheet.axes
        behind = {"fc": theme.ground, "lw": 0, "pad": 1, "alpha": 0.8}
        name: dict[str, Any] = {"size": 9, "color": theme.ink, "bbox": behind}
        for place, group in enumerate(groups):
            ax.text(0.004, place - 0.42, group.name, transform=ax.get_yaxis_transform(), va="top", **name)
            for peer, made in group.over.items():
                _dots(ax, made, place + OFFSETS[peer])
        ax.axvline(1, color=theme.muted, lw=1.2)
        dressed(ax, theme, "", "")
        ax.grid(axis="y", visible=False)
        ax.grid(axis="x", color=theme.grid, lw=0.8)
        ax.set_ylim(len(groups) - 0.5, -0.5)
        ax.set_yticks([])
        ax.set_xlabel("times as fast: right of 1, ours is faster", color=theme.muted, size=9)
        figure = finished(replace(sheet, panel=0.2 + 0.58 * len(groups)))
        figure.subplots_adjust(left=0.2 / figure.get_figwidth())
    return figure


def _dots(ax: Axes, made: Against, y: float) -> None:
    ink, ratios = COLOURS[made.peer], [each.ratio for each in made.cells]
    ax.scatter(ratios, [y] * len(ratios), s=26, color=ink, alpha=0.5, lw=0, label=f"over {NAMES[made.peer]}")
    ax.plot([made.mean] * 2, [y - 0.13, y + 0.13], color=ink, lw=3)
