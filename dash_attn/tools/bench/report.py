"""Results as text: a table for each suite, the same with and without a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dash_attn.order import POLICIES

Row = dict[str, Any]  # as in a result's file: pictures of it need no torch
Table = tuple[list[str], list[list[str]]]  # header, lines

BASELINE = "fa4 det"
# Deterministic and not, by the same author: what determinism costs.
PAIRS = {"ours": ("default", "any"), "fa4": ("fa4 det", "fa4"), "fa2": ("fa2 det", "fa2")}


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first to the left, numbers to the right."""
    lines = [list(map(str, line)) for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in [shown[0], "-" * len(shown[0]), *shown[1:]])


def is_ours(name: str) -> bool:
    """An order, perhaps with changed fields of the kernel's config behind it."""
    order, *fields = name.split(" ")
    return order.partition(":")[0] in POLICIES and all("=" in field for field in fields)


def median(row: Row, name: str) -> float | None:
    found = row["us"].get(name)
    return None if found is None else float(found["median"])


def default_of(row: Row) -> str:
    """Our variant that `auto` stands for; older results name it by its place."""
    return str(row.get("default") or next((name for name in row["us"] if is_ours(name)), ""))


def unordered_of(row: Row) -> str:
    return next((name for name in row["us"] if name.startswith("any")), "any")


def tflops(row: Row, name: str) -> float | None:
    us = median(row, name)
    return row["flops"] / us / 1e6 if us and row.get("flops") else None


def throughput(result: Mapping[str, Any]) -> Table:
    """TFLOPS of every variant, and how our default stands to the baseline."""
    header, lines = _by_variant(result, "TFLOPS", tflops)
    for row, line in zip(result["rows"], lines, strict=True):
        ours, base = median(row, default_of(row)), median(row, BASELINE)
        line.append(f"{base / ours:.2f}x" if base and ours else "-")
    return [*header, f"ours/{BASELINE}"], lines


def memory(result: Mapping[str, Any]) -> Table | None:
    """Peak memory of every variant's call, or nothing where it was not counted."""
    if not any(any(row.get("peak_bytes", {}).values()) for row in result["rows"]):
        return None
    return _by_variant(result, "peak MB", lambda row, name: (row.get("peak_bytes", {}).get(name) or 0) / 1e6 or None)


def _by_variant(result: Mapping[str, Any], what: str, value: Callable[[Row, str], float | None]) -> Table:
    """One column for our default and one for the control, whatever orders they stand for in a mask."""
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["us"] if not _special(row, name)))
    lines = []
    for row in rows:
        values = [value(row, name) for name in (default_of(row), *names, unordered_of(row))]
        shown = ("-" if x is None else f"{x:.3g}" if x < 1 else f"{x:.0f}" for x in values)
        lines.append([row["cell"], *shown])
    return [what, "ours", *names, "any"], lines


def _special(row: Row, name: str) -> bool:
    return name == default_of(row) or name.startswith("any")


def ratios(result: Mapping[str, Any]) -> str:
    """Geometric mean and worst cell of our default and of our best order against each peer."""
    text = []
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["us"]))
    picks: dict[str, Callable[[Row], float | None]] = {
        "default order": lambda row: median(row, default_of(row)),
        "best order": lambda row: min((row["us"][n]["median"] for n in row["us"] if is_ours(n)), default=None),
    }
    for label, pick in picks.items():
        for name in names:
            if is_ours(name) or name.startswith("any"):
                continue
            pairs = [(median(row, name), pick(row), row["cell"]) for row in result["rows"]]
            found = [(theirs / own, cell) for theirs, own, cell in pairs if theirs and own]
            if found:
                mean = math.exp(sum(math.log(r) for r, _ in found) / len(found))
                worst, cell = min(found)
                text.append(f"{label}: geometric mean {mean:.3f}x {name}, worst {worst:.3f}x at {cell}")
    return "\n".join(text)


def pair_of(row: Row, pair: str) -> tuple[str, str]:
    """Names of the deterministic variant and its counterpart."""
    return (default_of(row), unordered_of(row)) if pair == "ours" else PAIRS[pair]


def price(row: Row, pair: str) -> float | None:
    """Share of its throughput that a library loses by being deterministic; below 0 it gains. From the times of the two
    by themselves, where they were taken."""
    alone = row.get("pairs", {}).get(pair)
    slow, fast = (median({"us": alone} if alone else row, name) for name in pair_of(row, pair))
    return 1 - fast / slow if slow and fast else None


def prices(result: Mapping[str, Any]) -> Table:
    """What determinism costs, by library."""
    lines = []
    for row in result["rows"]:
        found = [price(row, pair) for pair in PAIRS]
        lines.append([row["cell"], *("-" if x is None else f"{x:+.1%}" for x in found)])
    return ["price of determinism", *PAIRS], lines


def blocks(result: Mapping[str, Any]) -> Table:
    """Whole block, its parts, and the speed-up over the deterministic baseline."""
    lines = []
    for row in result["rows"]:
        base = median(row, BASELINE)
        for name, us in row["us"].items():
            part = row["parts"][name]
            shares = [part[key] / us["median"] for key in ("attention forward", "attention backward", "rest")]
            speed = f"{base / us['median']:.3f}x" if base else "-"
            peak = row["peak_bytes"].get(name)
            cells = [f"{us['median'] / 1e3:.2f}", *(f"{x:.0%}" for x in shares), f"{peak / 1e6:.0f}" if peak else "-"]
            lines.append([row["cell"], name, *cells, speed])
    return ["block", "backward", "ms", "attn fwd", "attn bwd", "rest", "peak MB", f"vs {BASELINE}"], lines


def hosts(result: Mapping[str, Any]) -> Table:
    """Microseconds until a call returns, and how our forward and backward stands to torch's."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["us"]))
    lines = []
    for row in result["rows"]:
        ours, base = median(row, "attention"), median(row, "torch")
        values = (median(row, name) for name in names)
        ratio = f"{ours / base:.2f}x" if ours and base else "-"
        lines.append([row["cell"], *("-" if x is None else f"{x:.0f}" for x in values), ratio])
    return ["host us", *names, "attention/torch"], lines


def deviations(result: Mapping[str, Any]) -> Table:
    """The paper's Table 1."""
    lines = []
    for row in result["rows"]:
        for name, found in row["deviation"].items():
            worst = [f"{found['worst'][key]:.1e}" if found["worst"][key] else "0" for key in ("dq", "dk", "dv")]
            mean = f"{found['mean']:.1e}" if found["mean"] else "0"
            lines.append([row["cell"], name, "yes" if found["deterministic"] else "no", mean, *worst])
    return ["case", "variant", "promised", "mean of max", "dq", "dk", "dv"], lines


def absent(result: Mapping[str, Any]) -> str:
    """What did not run or ran wrong, once for each reason."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for row in result["rows"]:
        for kind in ("missing", "failed"):
            for name, why in row.get(kind, {}).items():
                places.setdefault((kind, name, why), []).append(row["cell"])
    everywhere = len(result["rows"])
    text = []
    for (kind, name, why), cells in places.items():
        where = "everywhere" if len(cells) == everywhere else ", ".join(cells[:4]) + (" ..." if len(cells) > 4 else "")
        text.append(f"{kind.upper() if kind == 'failed' else kind}: {name} ({where}): {why}")
    return "\n".join(text)


def tables(result: Mapping[str, Any]) -> list[Table]:
    """The tables of a suite."""
    suite = result.get("suite", "grid")
    if suite == "host":
        return [hosts(result)]
    if suite in ("block", "deviation"):
        return [blocks(result) if suite == "block" else deviations(result)]
    priced = suite == "price" or any(price(row, "ours") is not None for row in result["rows"])
    found = [throughput(result), memory(result), prices(result) if priced else None]
    return [table for table in found if table is not None]


def summary(result: Mapping[str, Any]) -> str:
    """All that is to be said about a result."""
    parts = [text_table(*table) for table in tables(result)]
    if result.get("suite") not in ("block", "deviation", "host"):
        parts.append(ratios(result))
    return "\n\n".join(part for part in [*parts, absent(result)] if part)
