"""Our default order against its peers: the speed-up in every cell, its geometric mean, its worst, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dash_attn.tools.bench.report import Row, geometric_mean, is_ours, speed, times
from dash_attn.tools.viz.plots import NAMES, OURS, Theme, dressed, finished, new_sheet

PEERS = {"fa4 det": "FA4 deterministic", "fa4": "FA4"}
COLOURS = {"fa4 det": OURS, "fa4": "#3b8bc4"}
# Rows of the picture are this far below the middle of their suite; its name stands above them.
OFFSETS = {"fa4 det": 0.03, "fa4": 0.32}


@dataclass(frozen=True)
class Speedup:
    """The time of a peer over that of our default in one cell: above 1 ours is faster.

    `wrong` says that the gradients of the peer are wrong there.
    """

    cell: str
    ratio: float
    wrong: bool


@dataclass(frozen=True)
class Against:
    """The speed-ups over one peer, at least one."""

    peer: str
    cells: tuple[Speedup, ...]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return geometric_mean(each.ratio for each in self.cells)

    @property
    def worst(self) -> Speedup:
        """The cell in which ours stands worst."""
        return min(self.cells, key=lambda each: each.ratio)

    @property
    def place(self) -> str:
        """The name of that cell."""
        return self.worst.cell + (" (wrong gradients)" if self.worst.wrong else "")

    @property
    def texts(self) -> tuple[str, str]:
        """Mean and worst."""
        return times(self.mean), times(self.worst.ratio)


def against(rows: Sequence[Row], peer: str) -> Against | None:
    """Our default against a peer, over the cells that timed both; None where none did."""
    cells = [
        Speedup(str(row["cell"]), ratio, peer in row.get("failed", {}))
        for row in rows
        if "us" in row and (ratio := speed(row, peer))
    ]
    return Against(peer, tuple(cells)) if cells else None


def peers(rows: Sequence[Row]) -> list[Against]:
    """Our default against every variant that is not ours."""
    names = dict.fromkeys(name for row in rows for name in row.get("us", {}))
    others = [name for name in names if not is_ours(name) and not name.startswith("any")]
    return [made for name in others if (made := against(rows, name)) is not None]


def headline_table(suites: Mapping[str, Sequence[Row]]) -> list[list[str]]:
    """A row for each suite (by heading) that timed FlashAttention-4; the first row is the header."""
    header = ["suite", *(text for name in PEERS.values() for text in (f"mean over {name}", "worst")), "cells"]
    lines = []
    for heading, rows in suites.items():
        made = [against(rows, peer) for peer in PEERS]
        if any(made):
            cells = [text for each in made for text in (each.texts if each else ("-", "-"))]
            lines.append([heading, *cells, str(len(rows))])
    return [header, *lines]


def headline_plot(suites: Mapping[str, Sequence[Row]], environment: Mapping[str, Any], theme: Theme) -> Figure:
    """A dot for each cell, a bar at the geometric mean; two rows for each suite."""
    timed = {heading: rows for heading, rows in suites.items() if any(against(rows, peer) for peer in PEERS)}
    with matplotlib.rc_context({"text.parse_math": False}):
        sheet = new_sheet({"environment": environment}, theme, 1, "Speed of ours over that of FlashAttention-4")
        (ax,) = sheet.axes
        behind = {"fc": theme.ground, "lw": 0, "pad": 1, "alpha": 0.8}
        name: dict[str, Any] = {"size": 9, "color": theme.ink, "bbox": behind}
        for place, (heading, rows) in enumerate(timed.items()):
            ax.text(0.004, place - 0.42, heading, transform=ax.get_yaxis_transform(), va="top", **name)
            for peer in PEERS:
                _dots(ax, against(rows, peer), place + OFFSETS[peer], None if place else f"over {NAMES[peer]}")
        ax.axvline(1, color=theme.muted, lw=1.2)
        dressed(ax, theme, "", "")
        ax.grid(axis="y", visible=False)
        ax.grid(axis="x", color=theme.grid, lw=0.8)
        ax.set_ylim(len(timed) - 0.5, -0.5)
        ax.set_yticks([])
        ax.set_xlabel("times as fast: right of 1, ours is faster", color=theme.muted, size=9)
        figure = finished(replace(sheet, panel=0.2 + 0.58 * len(timed)))
        figure.subplots_adjust(left=0.2 / figure.get_figwidth())
    return figure


def _dots(ax: Axes, made: Against | None, y: float, label: str | None) -> None:
    if made is None:
        return
    ink, ratios = COLOURS[made.peer], [each.ratio for each in made.cells]
    ax.scatter(ratios, [y] * len(ratios), s=26, color=ink, alpha=0.5, lw=0, label=label)
    ax.plot([made.mean] * 2, [y - 0.13, y + 0.13], color=ink, lw=3)
