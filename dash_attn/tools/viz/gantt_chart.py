"""Gantt charts as PNG or SVG: one row a worker, one bar an event; several charts share one time axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from dash_attn.timeline import COMPUTE, REDUCE, STALL, Timeline
from dash_attn.tools.viz import palette
from dash_attn.tools.viz.charts import Chart, Source, chart, charts, lanes
from dash_attn.tools.viz.palette import ColourBy, keys, swatches

Label = Callable[[Timeline, str, int], str]

POINTS = 72  # to the inch
COMPUTE_SHARE = 0.6  # of a row, where reductions run beside it
THIN = 6  # points; a row below this shows no reductions beside its compute
RASTER_ABOVE = 8000  # bars; more of them make a vector file too heavy to open
LETTER = 0.62  # width of a digit over the size of the type
SMALLEST = 5.5  # points of type that can still be read


def gantt(source: Source, path: str | Path, *, lower_bound: float | None = None, colour: ColourBy = "q") -> Path:
    """Draw one timeline; the ending of `path` chooses PNG or SVG.

    A simulation has its own lower bound. For a bare timeline it can be given.
    """
    drawn = chart(source)
    if lower_bound is not None:
        drawn = replace(drawn, lower_bound=lower_bound)
    return compare([drawn], path, colour=colour)


def compare(sources: Sequence[Source], path: str | Path, *, colour: ColourBy = "q") -> Path:
    """Draw timelines one below the other on one time axis."""
    return save(stack(charts(sources), colour=colour), path)


def stack(drawn: Sequence[Chart], *, colour: ColourBy = "q", width: float = 11.0) -> Figure:
    """Charts one below the other, a legend under them. `width` is in inches."""
    if not drawn:
        raise ValueError("nothing to draw: at least one timeline is needed")
    heights = [rows_height(c.timeline.workers) for c in drawn]
    figure = canvas(width, sum(heights) + 0.46 * len(drawn) + 0.76)
    top = 0.42
    for each, height in zip(drawn, heights, strict=True):
        axes = panel(figure, (0.62, top, width - 0.84, height))
        draw(axes, each, colour=colour, end=max(c.makespan for c in drawn))
        if each is not drawn[-1]:
            axes.tick_params(labelbottom=False)
            axes.set_xlabel("")
        top += height + 0.46
    legend(figure, drawn, colour)
    return figure


def q_index(timeline: Timeline, role: str, task: int) -> str:
    """The label of the paper's figures: the q tile, on the compute bar."""
    return str(timeline.names.q_tile[task]) if role == "compute" else ""


def draw(
    axes: Axes,
    source: Source,
    *,
    colour: ColourBy = "q",
    end: float | None = None,
    label: Label = q_index,
    note: str | None = None,
) -> None:
    """Draw one chart into axes of a figure; `note` replaces the facts above the chart."""
    drawn = chart(source)
    line = drawn.timeline
    rows = line.workers
    axes.set(xlim=(0, (end or drawn.makespan or 1.0) * 1.005), ylim=(rows, 0))
    gap = 0.06 if _row_points(axes) > 5 else 0.0
    for row in range(rows):
        axes.add_patch(Rectangle((0, row + gap), drawn.makespan, 1 - 2 * gap, color=palette.BUBBLE, lw=0))
    _bars(axes, line, colour, gap)
    _labels(axes, drawn, colour, label)
    axes.axvline(drawn.makespan, color=palette.INK, lw=1.6, clip_on=False)
    if drawn.lower_bound is not None:
        axes.axvline(drawn.lower_bound, color=palette.INK, lw=1.1, ls=(0, (3, 2)), clip_on=False)
    _frame(axes, drawn, note)


def _bands(line: Timeline, gap: float, thin: bool) -> tuple[np.ndarray, np.ndarray]:
    """Top and bottom of every event's bar, in rows."""
    lane = lanes(line)
    top, bottom = line.worker + gap, line.worker + 1.0 - gap
    if thin:
        top = np.where(lane == 0, top, line.worker + COMPUTE_SHARE)
    elif writers := int(lane.max(initial=0)):
        share = (1 - COMPUTE_SHARE - gap) / writers
        bottom = line.worker + COMPUTE_SHARE + share * lane
        top = np.where(lane == 0, top, bottom - share)
    return top, bottom


def _bars(axes: Axes, line: Timeline, colour: ColourBy, gap: float) -> None:
    # In thin rows, reductions beside the compute would only be noise; a reader looks for stalls.
    thin = line.overlapping and _row_points(axes) < THIN
    top, bottom = _bands(line, gap, thin)
    key = keys(line.names, colour)
    fill = swatches(int(key.max(initial=0)) + 1, colour)
    # A light seam keeps equal neighbours apart, as long as it is thin against the bars.
    compute = (line.end - line.begin)[line.role == COMPUTE]
    seam = 0.5 if len(compute) and np.median(compute) * _points_per_unit(axes) > 5 else 0.0
    for role in (COMPUTE, STALL) if thin else (COMPUTE, REDUCE, STALL):
        at = np.flatnonzero(line.role == role)
        left, right, up, down = line.begin[at], line.end[at], top[at], bottom[at]
        corners = np.stack([left, up, right, up, right, down, left, down], axis=1).reshape(-1, 4, 2)
        bars = PolyCollection(list(corners), rasterized=len(line) > RASTER_ABOVE, linewidths=0)
        if role == STALL:
            bars.set(facecolors=palette.STALL if thin else palette.STALL_PALE, edgecolors=palette.STALL)
            bars.set_hatch("" if thin else "//////")
        else:
            shade = palette.REDUCE_SHADE if role == REDUCE else 1.0
            bars.set(facecolors=fill[key[line.task[at]]] * shade, edgecolors=palette.PAPER, linewidths=seam)
        axes.add_collection(bars, autolim=False)


def _labels(axes: Axes, drawn: Chart, colour: ColourBy, label: Label) -> None:
    """Names in the bars, all in one size. A bar that is too small for the longest name has none."""
    line = drawn.timeline
    ends = [drawn.makespan, drawn.makespan if drawn.lower_bound is None else drawn.lower_bound]
    texts = [label(line, event.role, event.task) for event in line]
    longest = LETTER * max(map(len, texts), default=0)
    if not longest:
        return
    points = 0.9 * _points_per_unit(axes)
    spans = [event.end - event.begin for event, text in zip(line, texts, strict=True) if text]
    tallest = _row_points(axes) * (COMPUTE_SHARE if line.overlapping else 1.0) * 0.62
    size = min(9.0, tallest, float(np.median(spans)) * points / longest)
    if size < SMALLEST:
        return
    key = keys(line.names, colour)
    fill = swatches(int(key.max(initial=0)) + 1, colour)
    middle = (COMPUTE_SHARE + 0.06) / 2 if line.overlapping else 0.5
    for event, text in zip(line, texts, strict=True):
        if not text or (event.end - event.begin) * points < size * longest:
            continue
        ground = fill[key[event.task]] * (palette.REDUCE_SHADE if event.role == "reduce" else 1.0)
        # A line at the end of something must not read as a digit.
        crossed = any(event.begin < end < event.end for end in ends)
        axes.text(
            (event.begin + event.end) / 2,
            event.worker + middle,
            text,
            path_effects=[withStroke(linewidth=3, foreground=ground)] if crossed else [],
            ha="center",
            va="center_baseline",
            size=size,
            zorder=4,
            color=palette.INK if palette.is_light(ground) else palette.PAPER,
        )


def _frame(axes: Axes, drawn: Chart, note: str | None) -> None:
    row_points, rows = _row_points(axes), drawn.timeline.workers
    every = next(k for k in (1, 2, 4, 8, 16, 32, 64, 128, rows) if k * row_points >= 9 or k >= rows)
    axes.set_yticks(np.arange(0, rows, every) + 0.5, [str(row) for row in range(0, rows, every)])
    axes.set_ylabel("worker", size=9, color=palette.MUTED)
    axes.set_xlabel(f"time [{drawn.timeline.unit}]", size=9, color=palette.MUTED, labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(length=0, colors=palette.MUTED, labelsize=8)
    axes.tick_params(axis="x", length=3)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c9ced8")
    axes.set_title(drawn.title, loc="left", fontsize=10.5, fontweight="bold", color=palette.INK, pad=5)
    facts = "    ".join(f"{name} {value}" for name, value in drawn.facts())
    axes.set_title(facts if note is None else note, loc="right", fontsize=8.5, color=palette.MUTED, pad=5)


def legend(figure: Figure, drawn: Sequence[Chart], colour: ColourBy) -> None:
    """The meaning of bars and lines, and the colours of the keys, along the bottom."""
    key = max(int(keys(c.timeline.names, colour).max(initial=0)) + 1 for c in drawn)
    sample = palette.rgb(palette.RAMP[1])
    rest = "bubble, prologue, epilogue" if any(c.timeline.overlapping for c in drawn) else "bubble"
    handles: list[Patch | Line2D] = [
        Patch(color=sample, lw=0, label="compute"),
        Patch(color=sample * palette.REDUCE_SHADE, lw=0, label="reduce"),
        Patch(fc=palette.STALL_PALE, ec=palette.STALL, hatch="//////", lw=0, label="stall"),
        Patch(color=palette.BUBBLE, lw=0, label=rest),
        Line2D([], [], color=palette.INK, lw=1.6, label="makespan"),
    ]
    if any(c.lower_bound is not None for c in drawn):
        handles.append(Line2D([], [], color=palette.INK, lw=1.1, ls=(0, (3, 2)), label="lower bound"))
    wide, high = figure.get_figwidth(), figure.get_figheight()
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.55 / wide, 0.02 / high),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        handlelength=1.3,
        columnspacing=1.4,
        labelcolor=palette.INK,
    )
    _strip(figure, key, colour)


def _strip(figure: Figure, count: int, colour: ColourBy) -> None:
    """The keys and their colours, at the lower right."""
    wide = figure.get_figwidth()
    length = min(1.5, 0.19 * count)
    axes = panel(figure, (wide - 0.3 - length, figure.get_figheight() - 0.27, length, 0.13))
    axes.imshow(swatches(count, colour)[None], aspect="auto", interpolation="nearest")
    axes.set_yticks([])
    every = max(1, -(-count // 8))
    axes.set_xticks(range(0, count, every))
    axes.tick_params(length=0, labelsize=7, pad=1, colors=palette.MUTED)
    axes.set_ylabel(palette.WORDS[colour], rotation=0, ha="right", va="center", size=8.5, color=palette.INK, labelpad=4)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _row_points(axes: Axes) -> float:
    low, high = axes.get_ylim()
    return float(axes.bbox.height * POINTS / axes.figure.dpi / abs(high - low))


def _points_per_unit(axes: Axes) -> float:
    low, high = axes.get_xlim()
    return float(axes.bbox.width * POINTS / axes.figure.dpi / (high - low))


def rows_height(workers: int) -> float:
    """The height of the rows in inches: comfortable for a few, still told apart for 132."""
    return min(max(0.055, min(0.27, 3.4 / workers)) * workers, 9.0)


def canvas(width: float, height: float) -> Figure:
    """An empty figure with a canvas of its own: nothing global, so it works in threads and servers."""
    figure = Figure(figsize=(width, height), facecolor=palette.PAPER)
    FigureCanvasAgg(figure)
    return figure


def panel(figure: Figure, box: tuple[float, float, float, float]) -> Axes:
    """Axes at (left, top, width, height) in inches from the upper left corner."""
    wide, high = figure.get_figwidth(), figure.get_figheight()
    left, top, width, height = box
    return figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure; equal figures give equal files."""
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"a picture ends in .png or .svg, not {path.suffix or 'nothing'!r}: {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    undated = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "dash_attn", "hatch.linewidth": 0.7}):
        figure.savefig(path, dpi=160, metadata=undated)
    return path
