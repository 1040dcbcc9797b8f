"""The map of two recorded runs: which module had parted in which step, forward, backward and in the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dash_attn.tools.viz.palette import BUBBLE, INK, MUTED, PAPER, STALL
from dash_attn.watching.difference import Difference, common_steps, states
from dash_attn.watching.files import Record, Row

PANELS = {
    "forward": ("start", "data", "script", "forward", "buffer"),
    "backward": ("recompute", "backward"),
    "update": ("reduce", "update"),
}
NOTHING, EQUAL, PARTED = 0, 1, 2
MOST_LINES, MOST_STEPS, BEFORE = 48, 64, 8


@dataclass(frozen=True, eq=False)
class Map:
    """Cells by panel, line and step: nothing recorded, all equal, or something parted."""

    lines: list[str]
    steps: list[int]
    cells: npt.NDArray[np.int8]


def parted(a: Record, b: Record, first: Difference | None) -> Map:
    """The map of the steps around the first difference. Modules deep in the model share a line if there are many."""
    panel = {phase: index for index, phases in enumerate(PANELS.values()) for phase in phases}
    steps = window(common_steps(a, b), None if first is None else first.step)
    rows = [row for number in steps for row in a.steps[number].rows if row.phase in panel]
    depth = next(depth for depth in range(12, -1, -1) if depth == 0 or len(lines_of(rows, depth)) <= MOST_LINES)
    lines = lines_of(rows, depth)
    cells = np.zeros((len(PANELS), len(lines), len(steps)), np.int8)
    for column, number in enumerate(steps):
        state_of = states(a.steps[number], b.steps[number], b.steps.get(number - 1))
        for row, state in zip(a.steps[number].rows, state_of, strict=True):
            if row.phase in panel:
                at = panel[row.phase], lines.index(line_of(row, depth)), column
                cells[at] = max(cells[at], PARTED if state else EQUAL)
    return Map(lines, steps, cells)


def window(steps: Sequence[int], first: int | None) -> list[int]:
    """All steps if they are few, else some before the first difference and more after it."""
    if first is None or len(steps) <= MOST_STEPS:
        return list(steps[:MOST_STEPS])
    begin = max(0, min(steps.index(first) - BEFORE, len(steps) - MOST_STEPS))
    return list(steps[begin : begin + MOST_STEPS])


def line_of(row: Row, depth: int) -> str:
    if row.phase == "data":
        return "(data)"
    return ".".join(row.module.split(".")[:depth]) or "(model)"


def lines_of(rows: Sequence[Row], depth: int) -> list[str]:
    return list(dict.fromkeys(line_of(row, depth) for row in sorted(rows, key=lambda row: row.phase == "start")))


def picture(a: Record, b: Record, first: Difference | None, path: Path) -> None:
    """Draw the map to a file."""
    drawn = parted(a, b, first)
    height = 1.5 + 0.2 * len(drawn.lines)
    figure = Figure(figsize=(11, height), facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for index, (name, axis) in enumerate(zip(PANELS, axes, strict=True)):
        axis.pcolormesh(
            drawn.cells[index], cmap=ListedColormap([PAPER, BUBBLE, STALL]), vmin=0, vmax=2, edgecolors=PAPER
        )
        axis.set_title(name, fontsize=10, color=INK)
        axis.set_xlabel("step", fontsize=9, color=MUTED)
        shown = range(0, len(drawn.steps), max(1, len(drawn.steps) // 8))
        axis.set_xticks([column + 0.5 for column in shown], [str(drawn.steps[column]) for column in shown])
        axis.set_yticks(np.arange(len(drawn.lines)) + 0.5, drawn.lines)
        axis.tick_params(labelsize=8, length=0, colors=MUTED)
        axis.spines[:].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(title(first), fontsize=11, color=INK, x=0.01, ha="left")
    if first is not None:
        mark(drawn, first, axes)
    patches = [Patch(color=BUBBLE, label="equal"), Patch(color=STALL, label="parted")]
    figure.legend(handles=patches, loc="upper right", ncols=2, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.05 / height))
    figure.savefig(path, dpi=150)


def title(first: Difference | None) -> str:
    if first is None:
        return "No tensor parted"
    return f"First parted in step {first.step}: {first.tensor} of {first.row.module or 'the model'}, {first.direction}"


def mark(drawn: Map, first: Difference, axes: Sequence[object]) -> None:
    """A frame around the cell of the first difference."""
    index = next(i for i, phases in enumerate(PANELS.values()) if first.row.phase in phases)
    line = next(
        (i for d in range(12, -1, -1) for i, each in enumerate(drawn.lines) if each == line_of(first.row, d)), 0
    )
    box = Rectangle(
        (drawn.steps.index(first.step), line), 1, 1, fill=False, edgecolor=INK, linewidth=1.8, clip_on=False
    )
    axes[index].add_patch(box)  # type: ignore[attr-defined]
