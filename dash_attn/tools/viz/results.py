"""Benchmark results as pictures: what the paper's figures show, from files that `dash-attn bench` wrote.

A family of variants has one colour; what is not deterministic is dashed or pale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dash_attn.tools.bench.report import BASELINE, PAIRS, Row, default_of, is_audit, is_ours, median, price, tflops
from dash_attn.tools.viz.gantt import save

OURS = "#2fa384"
FAMILIES = {
    "ours": OURS,
    "any": OURS,
    "descending": "#86c97c",
    "fa3": "#b0793a",
    "diagonal": "#5b5ea6",
    "spt": "#9c6ade",
    "search": "#35a7a5",
    "shift": OURS,
    "symmetric_shift": OURS,
    "fa4": "#3b8bc4",
    "fa2": "#8a8f99",
    "cudnn": "#c77fb0",
    "triton": "#e8a838",
    "flex": "#5fb3d9",
}
MARKERS = {"ours": "o", "fa4": "s", "fa2": "v", "cudnn": "^", "triton": "D", "flex": "P", "any": "o"}
PARTS = {"attention forward": "#8fcdf0", "attention backward": "#3b8bc4", "rest": "#8a8f99"}
FREE = ("fa4", "fa2", "cudnn", "flex", "any")  # names of variants that add in any order


@dataclass(frozen=True)
class Theme:
    """Colours of everything that is no data."""

    ground: str = "#ffffff"
    ink: str = "#1f2430"
    muted: str = "#6b7280"
    grid: str = "#e3e6ec"


LIGHT, DARK = Theme(), Theme("#14171f", "#e8eaf0", "#9aa1ad", "#2b303b")
Result = dict[str, Any]


def plot(files: Sequence[Path], out: Path, *, dark: bool = False, kind: str = "png") -> list[Path]:
    """Draw every suite found in the files; the paths of the pictures."""
    if kind not in ("png", "svg"):
        raise ValueError(f"--format {kind!r}: choose png or svg")
    theme = DARK if dark else LIGHT
    ending = f"{'_dark' if dark else ''}.{kind}"
    return [save(DRAWN[name](result, theme), out / f"{name}{ending}") for name, result in gathered(files).items()]


def gathered(files: Sequence[Path]) -> dict[str, Result]:
    """By suite; the rows of files of one suite together, and their commands and notes. A grid has timed the pairs
    of the price by themselves, and stands for a run of `price` where there is none."""
    suites: dict[str, Result] = {}
    for file in files:
        if is_audit(file):
            continue
        result = read(file)
        found = suites.setdefault(result["suite"], {**result, "rows": [], "commands": [], "notes": []})
        found["rows"].extend(result["rows"])
        for name in ("command", "note"):
            found[f"{name}s"] += [x for x in [result.get("environment", {}).get(name)] if x]
    priced = [row for row in suites.get("grid", {}).get("rows", []) if "ours" in row.get("pairs", {})]
    if priced and "price" not in suites:
        suites["price"] = {**suites["grid"], "suite": "price", "rows": priced}
    return suites


def read(file: Path) -> Result:
    """A result, as it is now: older files name no suite and no shapes."""
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        rows = result["rows"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file}: not a result of dash-attn bench") from None
    if not rows:
        raise ValueError(f"{file}: holds no rows")
    named = all(row["cell"].startswith("d") and len(row["cell"].split()) == 3 for row in rows)
    suite = result.setdefault("suite", "grid" if named else "models")
    if suite not in DRAWN:
        raise ValueError(f"{file}: suite {suite!r} has no picture; known are {', '.join(DRAWN)}")
    if suite in ("grid", "price", "length") and not all("shape" in row for row in rows):
        for row in rows:
            dim, mask, length = row["cell"].split()
            row["shape"] = {"dim": int(dim[1:]), "mask": mask, "len_q": int(length)}
    return dict(result)


def family(row: Row, name: str) -> str:
    """What a variant is called in pictures: our default and our control whatever orders they are."""
    if name == default_of(row):
        return "ours"
    return "any" if name.startswith("any") else name


def colour(name: str) -> str:
    return FAMILIES.get(name, FAMILIES.get(name.split(" ")[0].partition(":")[0], "#8a8f99"))


def throughput(result: Result, theme: Theme) -> Figure:
    """TFLOPS over the length, a panel for each head dim and mask (the paper's Figures 8 and 9)."""
    panels: dict[tuple[int, str], list[Row]] = {}
    for row in result["rows"]:
        panels.setdefault((row["shape"]["dim"], row["shape"]["mask"]), []).append(row)
    keys = sorted(panels)
    figure, axes = sheet(result, theme, len(keys), "Backward throughput, TFLOPS")
    for ax, key in zip(axes, keys, strict=True):
        curves(ax, panels[key], tflops, theme)
        dressed(ax, theme, f"head dim {key[0]}, {key[1]} mask")
        ax.set_ylim(bottom=0)
    legend(figure, axes, theme)
    return figure


def curves(ax: Axes, rows: Sequence[Row], value: Callable[[Row, str], float | None], theme: Theme) -> None:
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
    ax.set_xlabel("sequence length", color=theme.muted, size=9)


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def lengths(result: Result, theme: Theme) -> Figure:
    """Throughput and memory over the length."""
    figure, (left, right) = sheet(result, theme, 2, "Cost against length")
    curves(left, result["rows"], tflops, theme)
    dressed(left, theme, "TFLOPS of the backward")
    curves(right, result["rows"], lambda row, name: (row.get("peak_bytes", {}).get(name) or 0) / 1e9 or None, theme)
    if right.lines:
        right.set_yscale("log")
    dressed(right, theme, "memory of a call at its peak, GB")
    legend(figure, [left, right], theme)
    return figure


def bars(ax: Axes, groups: Sequence[str], series: dict[str, list[float | None]], text: str, pale: bool = True) -> None:
    """Bars side by side in each group, each with its number."""
    width = 0.82 / max(1, len(series))
    for i, (name, values) in enumerate(series.items()):
        place = [g - 0.41 + (i + 0.5) * width for g, y in enumerate(values) if y is not None]
        heights = [y for y in values if y is not None]
        alpha = 0.55 if pale and name in FREE else 1.0
        drawn = ax.bar(place, heights, width * 0.92, label=name, color=colour(name), alpha=alpha)
        if len(groups) * len(series) <= 60:
            ax.bar_label(drawn, [text.format(y) for y in heights], size=6, padding=1, color=ax.yaxis.label.get_color())
    ax.set_xticks(
        range(len(groups)), groups, rotation=25 if len(groups) > 4 else 0, ha="right" if len(groups) > 4 else "center"
    )


def columns(rows: Sequence[Row], value: Callable[[Row, str], float | None]) -> dict[str, list[float | None]]:
    """Values by family, None where a row has none."""
    names = list(dict.fromkeys(family(row, name) for row in rows for name in row["us"]))

    def one(row: Row, wanted: str) -> float | None:
        return next((value(row, name) for name in row["us"] if family(row, name) == wanted), None)

    return {name: [one(row, name) for row in rows] for name in names}


def models(result: Result, theme: Theme) -> Figure:
    """TFLOPS at the shapes of models."""
    figure, (ax,) = sheet(result, theme, 1, "Backward of attention at model dimensions, TFLOPS")
    bars(ax, [row["cell"] for row in result["rows"]], columns(result["rows"], tflops), "{:.0f}")
    dressed(ax, theme, "")
    legend(figure, [ax], theme)
    return figure


def prices(result: Result, theme: Theme) -> Figure:
    """Throughput lost by being deterministic, in percent (the paper's Figure 1)."""
    figure, (ax,) = sheet(result, theme, 1, "Price of determinism: throughput lost, %")
    found = {pair: [price(row, pair) for row in result["rows"]] for pair in PAIRS}
    shown = {
        pair: [None if x is None else 100 * x for x in values]
        for pair, values in found.items()
        if any(x is not None for x in values)
    }
    bars(ax, [row["cell"] for row in result["rows"]], shown, "{:.0f}", pale=False)
    ax.axhline(0, color=theme.muted, lw=0.8)
    dressed(ax, theme, "")
    legend(figure, [ax], theme)
    return figure


def blocks(result: Result, theme: Theme) -> Figure:
    """Speed-up of a whole block, and what its time is spent on (the paper's Figure 10)."""
    figure, (left, right) = sheet(result, theme, 2, f"Transformer block, forward and backward, against {BASELINE}")
    rows = result["rows"]

    def speed(row: Row, name: str) -> float | None:
        base, own = median(row, BASELINE), median(row, name)
        return base / own if base and own else None

    made = {name: values for name, values in columns(rows, speed).items() if name != BASELINE}
    cells = [f"{row['model']} {short(row['shape']['len_q'])}" if "model" in row else row["cell"] for row in rows]
    bars(left, cells, made, "{:.2f}")
    found = [y for values in made.values() for y in values if y is not None]
    left.axhline(1, color=theme.muted, lw=0.8)
    if found:
        left.set_ylim(min(0.95, *found) - 0.02, max(1.05, *found) + 0.03)
    dressed(left, theme, "speed-up")
    base = np.zeros(len(rows))
    for part, ink in PARTS.items():
        share = np.array([_share(row, part) for row in rows])
        right.bar(range(len(rows)), share, 0.7, bottom=base, label=part, color=ink)
        base += share
    right.set_xticks(range(len(rows)), cells, rotation=25, ha="right")
    dressed(right, theme, "share of the time, ours, %")
    legend(figure, [left, right], theme)
    return figure


def _share(row: Row, part: str) -> float:
    name = default_of(row) if default_of(row) in row["us"] else next(iter(row["us"]), None)
    return 0.0 if name is None else 100 * row["parts"][name][part] / row["us"][name]["median"]


def hosts(result: Result, theme: Theme) -> Figure:
    """How long a small call takes to return."""
    figure, (ax,) = sheet(result, theme, 1, "Host time of a call whose problem was seen before, us")
    bars(ax, [row["cell"] for row in result["rows"]], columns(result["rows"], median), "{:.0f}")
    dressed(ax, theme, "")
    legend(figure, [ax], theme)
    return figure


def deviations(result: Result, theme: Theme) -> Figure:
    """Largest deviation between identical passes; what never deviates has no bar (the paper's Table 1)."""
    figure, (ax,) = sheet(result, theme, 1, "Largest deviation between identical backward passes, mean of 10")
    rows = result["rows"]
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
    dressed(ax, theme, "")
    legend(figure, [ax], theme)
    return figure


def sheet(result: Result, theme: Theme, panels: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, two in a row, titled with where the numbers come from."""
    across = min(2, panels)
    down = -(-panels // across)
    figure = Figure(figsize=(11, 1.65 + 3.1 * down), facecolor=theme.ground)
    FigureCanvasAgg(figure)
    axes = list(np.atleast_1d(figure.subplots(down, across, squeeze=False)).flat)
    for ax in axes[panels:]:
        ax.set_visible(False)
    for ax in axes:
        ax.set_facecolor(theme.ground)
        ax.yaxis.label.set_color(theme.ink)
    high = figure.get_figheight()
    env = result.get("environment", {})
    device = env.get("device") or str(env.get("gpu", "")).partition(",")[0]
    where = ", ".join(str(x) for x in (device, env.get("date")) if x)
    figure.text(0.02, 1 - 0.3 / high, title, size=13, weight="bold", color=theme.ink)
    figure.text(0.02, 1 - 0.53 / high, where, size=9, color=theme.muted)
    figure.subplots_adjust(0.055, 1.2 / high, 0.985, 1 - 0.95 / high, wspace=0.14, hspace=0.42)
    return figure, axes[:panels]


def dressed(ax: Axes, theme: Theme, title: str) -> None:
    ax.set_title(title, loc="left", size=10, color=theme.ink)
    ax.grid(axis="y", color=theme.grid, lw=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors=theme.muted, labelsize=8, length=0)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)


def legend(figure: Figure, axes: Sequence[Axes], theme: Theme) -> None:
    """One for all panels, at the foot."""
    found = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    order = sorted(found, key=lambda name: (name != "ours", name in PARTS))
    handles = [found[name] for name in order]
    figure.legend(
        handles,
        order,
        loc="lower center",
        ncols=min(9, max(1, len(order))),
        frameon=False,
        fontsize=8.5,
        labelcolor=theme.ink,
    )


DRAWN: dict[str, Callable[[Result, Theme], Figure]] = {
    "grid": throughput,
    "grid_close": throughput,
    "grid_ours": throughput,
    "models": models,
    "padded": models,
    "price": prices,
    "length": lengths,
    "block": blocks,
    "deviation": deviations,
    "host": hosts,
}
