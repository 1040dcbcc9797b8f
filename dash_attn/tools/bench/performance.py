"""The tables of docs/performance.md, made from the result files.

``python -m dash_attn.tools.bench.performance docs/performance.md benchmarks/results`` writes them anew: a table follows
each comment ``<!-- table: NAME -->``.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from dash_attn.tools.bench.headline import HEADER, headline
from dash_attn.tools.bench.json_text import from_json
from dash_attn.tools.bench.report import (
    BASELINE,
    Result,
    ResultRow,
    TableText,
    dated,
    days,
    default_of,
    geometric_mean,
    hosts,
    is_ours,
    markdown_table,
    median,
    percent,
    price,
    speed,
    step_times,
    tflops,
    times,
)
from dash_attn.tools.bench.suites import SUITES

Results = Mapping[str, Result]  # by suite
MARKED = re.compile(r"<!-- table: (\w+) -->\n(?:\|.*\n)*")


def filled(text: str, results: Results) -> str:
    """The document with every table made from the results."""
    return MARKED.sub(lambda mark: f"<!-- table: {mark[1]} -->\n{markdown_table(*TABLES[mark[1]](results))}\n", text)


def read_results(folder: Path) -> dict[str, Result]:
    """The results of a folder, by suite."""
    files = [from_json(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return {result["suite"]: result for result in files if "suite" in result}


def beside_fa4(results: Results) -> TableText:
    """Geometric mean and worst case beside FlashAttention-4."""
    lines = [[*group.line, ", ".join(map(_linked, group.suites))] for group in headline(results)]
    return [*HEADER, "file"], lines


def _linked(suite: str) -> str:
    return f"[{suite}](../benchmarks/results/{suite}_h200.json)"


def files(results: Results) -> TableText:
    """Version and days of every file. A file of several days has several runs."""
    lines = []
    for suite, result in sorted(results.items()):
        origin = result["environment"]
        lines.append([_linked(suite), origin["dash_attn"], days(dated(result["rows"], origin))])
    return ["file", "version", "measured"], lines


def grid(results: Results) -> TableText:
    """The contenders by themselves; the price of determinism from the pairs of the whole grid."""
    priced = {row["cell"]: price(row, "ours") for row in results["grid"]["rows"]}
    header, lines = _beside(results["grid_close"])
    lines = [[*line, percent(priced[line[0]])] for line in lines]
    return [*header, "price"], lines


def models(results: Results) -> TableText:
    header, lines = _beside(results["models"])
    prices = [percent(price(row, "ours")) for row in results["models"]["rows"]]
    return [*header, "price"], [[*line, x] for line, x in zip(lines, prices, strict=True)]


def length(results: Results) -> TableText:
    """With the memory of a call, and how much longer a call takes in panels."""
    header, lines = _beside(results["length"])
    for row, line in zip(results["length"]["rows"], lines, strict=True):
        line += [f"{row['peak_bytes'][name] / 1e6:,.0f}" for name in (BASELINE, default_of(row))]
        whole = speed(row, f"auto panels={PANELS}")
        line.append("-" if whole is None else percent(whole - 1))
    return [*header, "FA4 det, MB", "ours, MB", f"in {PANELS} panels"], lines


def few(results: Results) -> TableText:
    """Beside ours with '@group', which orders all q heads of a kv head together."""
    header, lines = _beside(results["few"])
    for row, line in zip(results["few"]["rows"], lines, strict=True):
        whole = next(name for name in row["us"] if is_ours(name) and name != default_of(row))
        line.append(times(speed(row, whole)))
    return [*header, "ours / @group"], lines


def packed(results: Results) -> TableText:
    """Beside ours with '@group', as in `few`. Ungrouped heads have one way only."""
    header, lines = _beside(results["packed"])
    for row, line in zip(results["packed"]["rows"], lines, strict=True):
        line[1] = row["shape"]["mask"].rpartition("(")[2].rstrip(")")
        line.append(times(speed(row, "auto@group")))
    return [header[0], "documents", *header[2:], "ours / @group"], lines


def step(results: Results) -> TableText:
    header, lines = step_times(results["step"])
    ratios = [times(speed(row, "fa4")) for row in results["step"]["rows"]]
    return [*header, "ours/fa4"], [[*line, x] for line, x in zip(lines, ratios, strict=True)]


def host(results: Results) -> TableText:
    return hosts(results["host"])


def _beside(result: Result) -> TableText:
    """TFLOPS of FlashAttention-4 and of ours, and their ratios. A star marks wrong gradients."""
    lines = []
    for row in result["rows"]:
        shown = [f"{_tflops(row, name)}{'*' if name in row['failed'] else ''}" for name in ("fa4", BASELINE)]
        ratios = [times(speed(row, name)) for name in (BASELINE, "fa4")]
        lines.append([row["cell"], default_of(row), *shown, _tflops(row, default_of(row)), *ratios])
    return ["case", "order", "FA4", "FA4 det", "ours", "ours / FA4 det", "ours / FA4"], lines


def _tflops(row: ResultRow, name: str) -> str:
    value = tflops(row, name)
    return "-" if value is None else f"{value:.0f}"


def orders(results: Results) -> TableText:
    """How much faster the default of the grid is than every other variant: mean, least and most of a mask."""
    rows = results["grid"]["rows"]
    names = dict.fromkeys(_family(name) for row in rows for name in row["us"] if name != default_of(row))
    lines = []
    for family in names:
        cells = []
        for mask in ("full", "causal"):
            ratios = [
                x
                for row in rows
                if row["shape"]["mask"] == mask
                for name in row["us"]
                if name != default_of(row) and _family(name) == family and (x := speed(row, name)) is not None
            ]
            spread = (
                f"{times(geometric_mean(ratios))} ({times(min(ratios))} to {times(max(ratios))})" if ratios else "-"
            )
            cells.append(spread)
        lines.append([family, *cells])
    return ["default of `grid` against", "full mask", "causal mask"], lines


def _family(name: str) -> str:
    if name.startswith("any"):
        return "ours without an order"
    return f"`{name}`" if is_ours(name) else name


def noise(results: Results) -> TableText:
    """How far samples of the order of `auto` scatter: the 80th percentile over the 20th, in the median of the cells."""
    lines = []
    for suite in ("grid", "grid_ours", "grid_close"):
        result = results[suite]
        scatter = [us["p80"] / us["p20"] for row in result["rows"] for us in [row["us"][default_of(row)]]]
        twins = [x for row in result["rows"] if (x := _twin(row)) is not None]
        span = f"{min(scatter):.2f} to {max(scatter):.2f}, median {statistics.median(scatter):.2f}"
        lines.append([f"`{suite}`", span, f"{max(twins):.1%}"])
    return ["suite", "80th / 20th percentile", "one order under two names differs by at most"], lines


def _twin(row: ResultRow) -> float | None:
    """How far apart `auto` and `shift:64` are where no head has more chains than both widths: they are one order."""
    width = int(default_of(row).partition(":")[2] or 0)
    chains = row["shape"]["len_k"] // 128
    wide = median(row, "shift:64")
    if wide is None or width >= 64 or width < chains:
        return None
    own = median(row, default_of(row)) or wide
    return abs(own / wide - 1)


PANELS = SUITES["length"].panels
TABLES: dict[str, Callable[[Results], TableText]] = {
    "headline": beside_fa4,
    "files": files,
    "grid": grid,
    "orders": orders,
    "noise": noise,
    "models": models,
    "length": length,
    "few": few,
    "packed": packed,
    "step": step,
    "host": host,
}

if __name__ == "__main__":
    document, folder = map(Path, sys.argv[1:3])
    document.write_text(filled(document.read_text(encoding="utf-8"), read_results(folder)), encoding="utf-8")
