"""Pictures of results: the figures of the paper, drawn from measured rows.

A family of variants has one colour. Variants that are not deterministic are dashed or pale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from dash_attn.tools.bench.report import BASELINE, PAIRS, ResultRow, default_of, is_ours, median, price, tflops

OURS = "#2fa384"
FAMILIES = {
    "ours": OURS,
    "any": OURS,
    "descending": "#86c97c",
    "fa3": "#b0793a",
    "diagonal": "#5b5ea6",
    "spt": "#9c6ade",
    "search": "#35a7a5",
    "level": "#c2a83e",
    "fold": "#7a8f3c",
    "shift": OURS,
    "symmetric_shift": OURS,
    "fa4": "#3b8bc4",
    "fa2": "#8a8f99",
    "cudnn": "#c77fb0",
    "triton": "#e8a838",
    "flex": "#5fb3d9",
}
NAMES = {
    "any": "ours without turns",
    "auto panels=8": "ours in 8 panels",
    "fa4": "FlashAttention-4",
    "fa4 det": "FlashAttention-4 deterministic",
    "fa2": "FlashAttention-2",
    "fa2 det": "FlashAttention-2 deterministic",
    "cudnn": "cuDNN",
    "triton two-pass": "Triton, two passes",
}
MARKERS = {"ours": "o", "fa4": "s", "fa2": "v", "cudnn": "^", "triton": "D", "flex": "P", "any": "o"}
PARTS = {"attention forward": "#8fcdf0", "attention backward": "#3b8bc4", "rest": "#8a8f99"}
FREE = ("fa4", "fa2", "cudnn", "flex", "any")  # names of variants that add in any order
DEVIATION = "largest difference"
Value = Callable[[ResultRow, str], float | None]


@dataclass(frozen=True)
class Theme:
    """Colours of everything that is no data. A narrow picture is for a phone: one panel a row, large type."""

    ground: str = "#ffffff"
    ink: str = "#1f2430"
    muted: str = "#5f6776"
    grid: str = "#e3e6ec"
    narrow: bool = False


LIGHT, DARK = Theme(), Theme("#14171d", "#e8eaf0", "#9aa1ad", "#2b303b")
NARROW = {theme: replace(theme, narrow=True) for theme in (LIGHT, DARK)}


@dataclass(frozen=True)
class Sheet:
    """A figure and its panels, the height of its title, and the height of a panel, in inches."""

    figure: Figure
    axes: list[Axes]
    theme: Theme
    top: float
    panel: float = 2.3


def figure_of(name: str, result: Mapping[str, Any], theme: Theme) -> Figure:
    """The picture of a suite."""
    # A '$' in a name from a file is a dollar, not a formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        return DRAWN[name](result, theme)


def throughput(result: Mapping[str, Any], theme: Theme) -> Figure:
    """TFLOPS over the length, a panel for each head dim and mask (the paper's Figures 8 and 9)."""
    panels = by_shape(result["rows"])
    sheet = new_sheet(result, theme, len(panels), "Backward throughput")
    for ax, (key, rows) in zip(sheet.axes, panels.items(), strict=True):
        curves(ax, rows, tflops, theme)
        dressed(ax, theme, f"head dim {key[0]}, {key[1]} mask", "TFLOPS")
        ax.set_ylim(bottom=0)
    return finished(sheet)


def by_shape(rows: Sequence[ResultRow]) -> dict[tuple[int, str], list[ResultRow]]:
    """Rows by head dim and mask, sorted by length."""
    panels: dict[tuple[int, str], list[ResultRow]] = {}
    for row in sorted(rows, key=lambda row: int(row["shape"]["len_q"])):
        panels.setdefault((int(row["shape"]["dim"]), str(row["shape"]["mask"])), []).append(row)
    return dict(sorted(panels.items()))


def family(row: ResultRow, name: str) -> str:
    """The name of a variant in pictures. Our default and our control have one name each, whatever their orders are."""
    if name == default_of(row):
        return "ours"
    return "any" if name.startswith("any") else name


def colour(name: str) -> str:
    return FAMILIES.get(name, FAMILIES.get(name.split(" ")[0].partition(":")[0], "#8a8f99"))


def curves(ax: Axes, rows: Sequence[ResultRow], value: Value, theme: Theme) -> None:
    """One line for each variant; ours above the others."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: int(row["shape"]["len_q"])):
        default = default_of(row)
        for name in row["us"]:
            y = value(row, name)
            other_width = name != default and name.partition(":")[0] == default.partition(":")[0]
            if y is not None and not other_width:
                series.setdefault(family(row, name), []).append((row["shape"]["len_q"], y))
    for name, points in sorted(series.items(), key=lambda item: item[0] == "ours"):
        own = name == "ours"
        ax.plot(
            *zip(*points, strict=True),
            label=name,
            color=colour(name),
            lw=2.6 if own else 1.4,
            ls="--" if name in FREE else "-",
            marker=MARKERS.get(name.split(" ")[0], "."),
            ms=5.5 if own else 4,
        )
    ax.set_xscale("log", base=2)
    ticks = sorted({x for points in series.values() for x, _ in points})
    ax.set_xticks(ticks, [short(x) for x in ticks])
    ax.minorticks_off()
    ax.set_xlabel("sequence length [tokens]", color=theme.muted, size=9)


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def lengths(result: Mapping[str, Any], theme: Theme) -> Figure:
    """Throughput and memory over the length."""
    sheet = new_sheet(result, theme, 2, "Cost against length")
    left, right = sheet.axes
    curves(left, result["rows"], tflops, theme)
    dressed(left, theme, "throughput of the backward", "TFLOPS")
    left.set_ylim(bottom=0)
    curves(right, result["rows"], lambda row, name: (row.get("peak_bytes", {}).get(name) or 0) / 1e9 or None, theme)
    if right.lines:
        right.set_yscale("log")
        right.yaxis.set_major_formatter("{x:g}")
        right.yaxis.set_minor_formatter(NullFormatter())
    dressed(right, theme, "peak memory of a call", "GB")
    return finished(sheet)


def bars(
    ax: Axes, groups: Sequence[str], series: dict[str, list[float | None]], text: str = "", base: float = 0.0
) -> None:
    """Bars side by side in each group, from `base` up or down.

    With `text` each bar has its number, unless numbers would touch each other.
    """
    width = 0.82 / max(1, len(series))
    wide = ax.get_position().width * ax.figure.get_figwidth() * 72  # type: ignore[union-attr]
    room = width * wide / max(1, len(groups))  # points a bar
    longest = max((len(text.format(y)) for values in series.values() for y in values if y is not None), default=0)
    for i, (name, values) in enumerate(series.items()):
        place = [g - 0.41 + (i + 0.5) * width for g, y in enumerate(values) if y is not None]
        heights = [y for y in values if y is not None]
        look: dict[str, Any] = {"label": name, "color": colour(name), "alpha": 0.55 if name in FREE else 1.0}
        drawn = ax.bar(place, [y - base for y in heights], width * 0.92, bottom=base, **look)
        if text and room >= longest * 0.62 * 7:
            ax.bar_label(drawn, [text.format(y) for y in heights], size=7, padding=1, color=ax.yaxis.label.get_color())
    crowded = max(map(len, groups), default=0) * 0.6 * 8 > wide / max(1, len(groups))
    turn: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    ax.set_xticks(range(len(groups)), groups, **turn)


def columns(rows: Sequence[ResultRow], value: Value) -> dict[str, list[float | None]]:
    """Values by family, None where a row has none."""
    names = list(dict.fromkeys(family(row, name) for row in rows for name in row["us"]))

    def one(row: ResultRow, wanted: str) -> float | None:
        return next((value(row, name) for name in row["us"] if family(row, name) == wanted), None)

    return {name: [one(row, name) for row in rows] for name in names}


def models(result: Mapping[str, Any], theme: Theme) -> Figure:
    """TFLOPS at the shapes of models."""
    sheet = new_sheet(result, theme, 1, "Backward of attention at the dimensions of models")
    bars(sheet.axes[0], [row["cell"] for row in result["rows"]], columns(result["rows"], tflops), "{:.0f}")
    dressed(sheet.axes[0], theme, "", "TFLOPS")
    return finished(sheet)


def prices(result: Mapping[str, Any], theme: Theme) -> Figure:
    """Throughput lost by being deterministic, in percent (the paper's Figure 1)."""
    panels = by_shape(result["rows"])
    sheet = new_sheet(result, theme, len(panels), "Price of determinism: throughput lost, below 0 gained")
    for ax, (key, rows) in zip(sheet.axes, panels.items(), strict=True):
        shares = {pair: [price(row, pair) for row in rows] for pair in PAIRS}
        shown = {
            pair_name(pair): [None if x is None else 100 * x for x in values]
            for pair, values in shares.items()
            if any(x is not None for x in values)
        }
        bars(ax, [short(row["shape"]["len_q"]) for row in rows], shown, "{:.0f}")
        ax.axhline(0, color=theme.muted, lw=0.8)
        ax.set_xlabel("sequence length [tokens]", color=theme.muted, size=9)
        dressed(ax, theme, f"head dim {key[0]}, {key[1]} mask", "%")
    return finished(sheet)


def pair_name(pair: str) -> str:
    return pair if pair == "ours" else f"{pair} det"


def blocks(result: Mapping[str, Any], theme: Theme) -> Figure:
    """Speed-up of a whole block, and the parts of its time (the paper's Figure 10)."""
    sheet = new_sheet(result, theme, 2, "Transformer block, forward and backward")
    (left, right), rows = sheet.axes, result["rows"]

    def gain(row: ResultRow, name: str) -> float | None:
        base, own = median(row, BASELINE), median(row, name)
        return base / own if base and own else None

    made = {name: values for name, values in columns(rows, gain).items() if name != BASELINE}
    cells = [f"{row['model']} {short(row['shape']['len_q'])}" if "model" in row else row["cell"] for row in rows]
    bars(left, cells, made, base=1.0)
    left.axhline(1, color=theme.muted, lw=0.8)
    dressed(left, theme, f"speed over that of {NAMES[BASELINE]}", "times as fast")
    base = np.zeros(len(rows))
    for part, ink in PARTS.items():
        share = np.array([_share(row, part) for row in rows])
        right.bar(range(len(rows)), share, 0.7, bottom=base, label=part, color=ink)
        base += share
    right.set_xticks(range(len(rows)), cells, rotation=35, ha="right", rotation_mode="anchor")
    dressed(right, theme, "parts of the time, ours", "%")
    return finished(sheet)


def _share(row: ResultRow, part: str) -> float:
    name = default_of(row) if default_of(row) in row["us"] else next(iter(row["us"]), None)
    return 0.0 if name is None else 100 * row["parts"][name][part] / row["us"][name]["median"]


def deviations(result: Mapping[str, Any], theme: Theme) -> Figure:
    """Largest deviation between identical passes (the paper's Table 1). A variant that never deviates has no bar."""
    sheet = new_sheet(result, theme, 1, "Largest difference between identical backward passes, mean of 10")
    (ax,), rows = sheet.axes, result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["deviation"]))
    labels = {name: "any" if name.startswith("any") else "ours" if is_ours(name) else name for name in names}
    series: dict[str, list[float | None]] = {}
    for name in names:
        values = series.setdefault(labels[name], [None] * len(rows))
        for i, row in enumerate(rows):
            if name in row["deviation"]:
                values[i] = row["deviation"][name]["mean"]
    bars(ax, [row["cell"] for row in rows], series, "{:.0e}")
    for text in ax.texts:
        if text.get_text() == "0e+00":
            text.set_text("0")
    dressed(ax, theme, "", DEVIATION)
    ax.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=False)
    ax.yaxis.get_offset_text().set(color=theme.muted, size=8)
    return finished(sheet)


def hosts(result: Mapping[str, Any], theme: Theme) -> Figure:
    """How long a small call takes to return."""
    sheet = new_sheet(result, theme, 1, "Host time of a call whose problem was seen before")
    (ax,) = sheet.axes
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["us"]))
    series = {name: [median(row, name) for row in result["rows"]] for name in names}
    bars(ax, [row["cell"] for row in result["rows"]], series, "{:.0f}")
    dressed(ax, theme, "", "microseconds")
    return finished(sheet)


def step_times(result: Mapping[str, Any], theme: Theme) -> Figure:
    """How long a step takes on the device."""
    sheet = new_sheet(result, theme, 1, "Layers of attention, forward and backward, with a new packing in every step")
    rows = result["rows"]
    milliseconds = columns(rows, lambda row, name: (median(row, name) or 0) / 1e3 or None)
    bars(sheet.axes[0], [row["cell"] for row in rows], milliseconds, "{:.1f}")
    dressed(sheet.axes[0], theme, "", "milliseconds")
    return finished(sheet)


def new_sheet(result: Mapping[str, Any], theme: Theme, panels: int, title: str) -> Sheet:
    """A figure with some panels, titled with the origin of its numbers."""
    across = 1 if theme.narrow else min(2, panels)
    down = -(-panels // across)
    figure = Figure(figsize=(4.6 if theme.narrow else 11, 1), facecolor=theme.ground)
    FigureCanvasAgg(figure)
    lines = fill(title, 40) if theme.narrow else title
    top = 0.72 + 0.2 * lines.count("\n")
    figure.set_figheight(top + 3.1 * down)
    axes = list(np.atleast_1d(figure.subplots(down, across, squeeze=False)).flat)
    for ax in axes[panels:]:
        ax.set_visible(False)
    for ax in axes:
        ax.set_facecolor(theme.ground)
        ax.yaxis.label.set_color(theme.ink)
    env = result["environment"]
    where = ", ".join(str(x) for x in (env.get("device"), env.get("date")) if x)
    size = 11 if theme.narrow else 13
    figure.text(0.02, 1, lines, size=size, weight="bold", color=theme.ink, va="top", gid="title")
    figure.text(0.02, 1, where, size=9, color=theme.muted, va="top", gid="where")
    return Sheet(figure, axes[:panels], theme, top)


def dressed(ax: Axes, theme: Theme, title: str, unit: str) -> None:
    """Title, unit, grid and colours of a panel."""
    ax.set_title(title, loc="left", size=10, color=theme.ink)
    ax.set_ylabel(unit, size=9, color=theme.muted)
    ax.grid(axis="y", color=theme.grid, lw=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors=theme.muted, labelsize=8.5, length=0)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)


def finished(sheet: Sheet) -> Figure:
    """Give everything its place, in inches, and one legend for all panels at the foot."""
    figure, theme = sheet.figure, sheet.theme
    handles = {
        label: handle for ax in sheet.axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    order = sorted(handles, key=lambda name: (name != "ours", name in PARTS))
    across = 2 if theme.narrow else 5
    foot = 0.2 * -(-len(order) // across) + 0.12
    turned = [len(text.get_text()) for ax in sheet.axes for text in ax.get_xticklabels() if text.get_rotation()]
    below = max(0.95, 0.15 + 0.038 * max(turned)) if turned else 0.45  # for the labels of the axis
    down = len({ax.get_subplotspec().rowspan.start for ax in sheet.axes})  # type: ignore[union-attr]
    top = sheet.top + (0.3 if any(ax.get_title(loc="left") for ax in sheet.axes) else 0.05)
    high = top + down * sheet.panel + (down - 1) * (below + 0.35) + below + foot
    figure.set_figheight(high)
    wide = figure.get_figwidth()
    texts = {text.get_gid(): text for text in figure.texts}
    texts["title"].set_y(1 - 0.1 / high)
    texts["where"].set_y(1 - (sheet.top - 0.32) / high)
    figure.subplots_adjust(
        left=0.78 / wide,
        right=1 - 0.12 / wide,
        top=1 - top / high,
        bottom=(below + foot) / high,
        wspace=0.2,
        hspace=(below + 0.35) / sheet.panel,
    )
    figure.legend(
        [handles[name] for name in order],
        [NAMES.get(name, name) for name in order],
        loc="lower center",
        ncols=min(across, max(1, len(order))),
        frameon=False,
        fontsize=8.5,
        columnspacing=1.4,
        labelcolor=theme.ink,
    )
    return figure


DRAWN: dict[str, Callable[[Mapping[str, Any], Theme], Figure]] = {
    "grid": throughput,
    "grid_close": throughput,
    "grid_ours": throughput,
    "models": models,
    "few": models,
    "packed": models,
    "padded": models,
    "price": prices,
    "length": lengths,
    "block": blocks,
    "deviation": deviations,
    "step": step_times,
    "host": hosts,
}
