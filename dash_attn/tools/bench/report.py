"""Results as text: the tables of each suite, for a terminal and for a document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dash_attn.order import POLICIES

ResultRow = dict[str, Any]  # one case of a result file; plain data, so that pictures of it need no torch
Result = Mapping[str, Any]  # a result file: environment, suite, rows
TableText = tuple[list[str], list[list[str]]]  # header, lines

BASELINE = "fa4 det"
# The deterministic and the other variant of one library: their times give the price of determinism.
PAIRS = {"ours": ("default", "any"), "fa4": ("fa4 det", "fa4"), "fa2": ("fa2 det", "fa2")}


def dated(rows: Iterable[ResultRow], environment: Mapping[str, Any]) -> list[ResultRow]:
    """Rows with the date of their run: their own, or that of their file, which has one run then."""
    return [{**row, "date": row.get("date", environment.get("date"))} for row in rows]


def days(rows: Iterable[ResultRow]) -> str:
    """When dated rows were measured: a date, or several with 'and'."""
    return " and ".join(sorted({str(row["date"]) for row in rows if row["date"]}))


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in columns of equal width: the first column to the left, numbers to the right."""
    lines = [list(map(str, line)) for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in [shown[0], "-" * len(shown[0]), *shown[1:]])


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same table for a document."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def is_ours(name: str) -> bool:
    """Whether a variant is an order of ours, possibly with changed fields of the kernel's config behind its name."""
    order, *fields = name.split(" ")
    policy = order.partition("@")[0].partition(":")[0]
    return policy in ("auto", *POLICIES) and all("=" in field for field in fields)


def median(row: ResultRow, name: str) -> float | None:
    """Microseconds of a variant, or None if it did not run."""
    us = row["us"].get(name)
    return None if us is None else float(us["median"])


def default_of(row: ResultRow) -> str:
    """The name of the variant that `auto` stands for in this row."""
    return str(row["default"])


def unordered_of(row: ResultRow) -> str:
    """The name of our variant without an order."""
    return next((name for name in row["us"] if name.startswith("any")), "any")


def tflops(row: ResultRow, name: str) -> float | None:
    us = median(row, name)
    return row["flops"] / us / 1e6 if us and row.get("flops") else None


def throughput(result: Result) -> TableText:
    """TFLOPS of every variant, and the ratio of our default to the baseline."""
    header, lines = _by_variant(result, "TFLOPS", tflops)
    for row, line in zip(result["rows"], lines, strict=True):
        line.append(times(speed(row, BASELINE)))
    return [*header, f"ours/{BASELINE}"], lines


def memory(result: Result) -> TableText | None:
    """Peak memory of every variant's call, or None where it was not counted."""
    if not any(any(row.get("peak_bytes", {}).values()) for row in result["rows"]):
        return None
    return _by_variant(result, "peak MB", lambda row, name: (row.get("peak_bytes", {}).get(name) or 0) / 1e6 or None)


def _by_variant(result: Result, what: str, value: Callable[[ResultRow, str], float | None]) -> TableText:
    """A column for each variant. Our default and our control have one column each, whatever their orders are."""
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["us"] if not _special(row, name)))
    lines = []
    for row in rows:
        values = [value(row, name) for name in (default_of(row), *names, unordered_of(row))]
        shown = ("-" if x is None else f"{x:.3g}" if x < 1 else f"{x:.0f}" for x in values)
        lines.append([row["cell"], *shown])
    return [what, "ours", *names, "any"], lines


def _special(row: ResultRow, name: str) -> bool:
    return name == default_of(row) or name.startswith("any")


def speed(row: ResultRow, peer: str) -> float | None:
    """How many times as fast as a variant our default is."""
    own, theirs = default_us(row), median(row, peer)
    return theirs / own if own and theirs else None


def times(ratio: float | None) -> str:
    """Two digits, but three for a ratio below 1 that two would round up to 1."""
    if ratio is None:
        return "-"
    return f"{ratio:.3f}x" if 0.995 <= ratio < 0.9995 else f"{ratio:.2f}x"


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(x) for x in values]
    return math.exp(sum(logs) / len(logs))


class Speedup(NamedTuple):
    """The time of a peer over ours in one cell: above 1 ours is faster."""

    cell: str
    ratio: float


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
    def texts(self) -> tuple[str, str]:
        """Mean and worst."""
        return times(self.mean), times(self.worst.ratio)


def default_us(row: ResultRow) -> float | None:
    """Microseconds of our default."""
    return median(row, default_of(row))


def best_us(row: ResultRow) -> float | None:
    """Microseconds of our fastest order."""
    return min((us["median"] for name, us in row["us"].items() if is_ours(name)), default=None)


def against(
    rows: Sequence[ResultRow], peer: str, own: Callable[[ResultRow], float | None] = default_us
) -> Against | None:
    """Ours against a peer, over the cells that timed both. None where no cell did.

    A cell in which the peer failed its check does not count: a wrong result has no speed.
    """
    pairs = [(row["cell"], median(row, peer), own(row)) for row in rows if peer not in row.get("failed", {})]
    cells = tuple(Speedup(str(cell), theirs / mine) for cell, theirs, mine in pairs if theirs and mine)
    return Against(peer, cells) if cells else None


def peers(rows: Sequence[ResultRow], own: Callable[[ResultRow], float | None] = default_us) -> list[Against]:
    """Ours against every variant that is not ours."""
    names = dict.fromkeys(name for row in rows for name in row.get("us", {}))
    others = [name for name in names if not is_ours(name) and not name.startswith("any")]
    return [made for name in others if (made := against(rows, name, own)) is not None]


def ratios(result: Result) -> str:
    """Geometric mean and worst cell of our default and of our best order against each peer."""
    return "\n".join(
        f"{label}: geometric mean {each.mean:.3f}x {each.peer}, worst {each.worst.ratio:.3f}x at {each.worst.cell}"
        for label, own in (("default order", default_us), ("best order", best_us))
        for each in peers(result["rows"], own)
    )


def pair_of(row: ResultRow, pair: str) -> tuple[str, str]:
    """Names of the deterministic variant of a library and of its counterpart."""
    return (default_of(row), unordered_of(row)) if pair == "ours" else PAIRS[pair]


def price(row: ResultRow, pair: str) -> float | None:
    """The share of its throughput that a library loses by being deterministic; below 0 it gains.

    The two are compared in a run of their own where there is one: there they draw the same power and have one clock.
    """
    alone = row.get("pairs", {}).get(pair)
    slow, fast = (median({"us": alone} if alone else row, name) for name in pair_of(row, pair))
    return 1 - fast / slow if slow and fast else None


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%}"


def prices(result: Result) -> TableText:
    """The price of determinism, by library."""
    lines = [[row["cell"], *(percent(price(row, pair)) for pair in PAIRS)] for row in result["rows"]]
    return ["price of determinism", *PAIRS], lines


def blocks(result: Result) -> TableText:
    """The time of a whole block, its parts, and the speed-up over the deterministic baseline."""
    lines = []
    for row in result["rows"]:
        base = median(row, BASELINE)
        for name, us in row["us"].items():
            part = row["parts"][name]
            shares = [part[key] / us["median"] for key in ("attention forward", "attention backward", "rest")]
            gain = f"{base / us['median']:.3f}x" if base else "-"
            peak = row["peak_bytes"].get(name)
            cells = [f"{us['median'] / 1e3:.2f}", *(f"{x:.0%}" for x in shares), f"{peak / 1e6:.0f}" if peak else "-"]
            lines.append([row["cell"], name, *cells, gain])
    return ["block", "backward", "ms", "attn fwd", "attn bwd", "rest", "peak MB", f"vs {BASELINE}"], lines


def hosts(result: Result) -> TableText:
    """Microseconds until a call returns, and the ratio of our forward and backward to torch's, round by round."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["us"]))
    lines = []
    for row in result["rows"]:
        values = (median(row, name) for name in names)
        shown = ("-" if us is None else f"{us:.0f}" for us in values)
        lines.append([row["cell"], *shown, times(row.get("ratio", _of_medians(row)))])
    return ["host us", *names, "attention/torch"], lines


def _of_medians(row: ResultRow) -> float | None:
    """For a file whose rows were not timed round by round."""
    ours, theirs = median(row, "attention"), median(row, "torch")
    return ours / theirs if ours and theirs else None


def step_times(result: Result) -> TableText:
    """Milliseconds of a step on the device, then until the host returns, and our time to assemble a new layout."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["us"]))
    lines = []
    for row in result["rows"]:
        values = [median({"us": row[key]}, name) for key in ("us", "host_us") for name in names]
        shown = ["-" if us is None else f"{us / 1e3:.2f}" for us in values]
        lines.append([row["cell"], *shown, f"{row['assemble_us']['median'] / 1e3:.2f}", times(speed(row, BASELINE))])
    header = [*(f"{name}, ms" for name in names), *(f"{name}, host ms" for name in names)]
    return ["step", *header, "assemble, ms", f"ours/{BASELINE}"], lines


def deviations(result: Result) -> TableText:
    """How far identical passes lie apart: the paper's Table 1."""
    lines = []
    for row in result["rows"]:
        for name, seen in row["deviation"].items():
            worst = [distance(seen["worst"][key]) for key in ("dq", "dk", "dv")]
            lines.append([row["cell"], name, "yes" if seen["deterministic"] else "no", distance(seen["mean"]), *worst])
    return ["case", "variant", "promised", "mean of max", "dq", "dk", "dv"], lines


def distance(x: float) -> str:
    return f"{x:.1e}" if x else "0"


def absent(result: Result) -> str:
    """Which variants did not run or were wrong, once for each reason."""
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


def tables(result: Result) -> list[TableText]:
    """The tables of a suite."""
    suite = result["suite"]
    alone = {"host": hosts, "block": blocks, "deviation": deviations, "step": step_times}
    if suite in alone:
        return [alone[suite](result)]
    priced = any(price(row, "ours") is not None for row in result["rows"])
    made = [throughput(result), memory(result), prices(result) if priced else None]
    return [table for table in made if table is not None]


def summary(result: Result) -> str:
    """All tables and sentences about a result."""
    parts = [text_table(*table) for table in tables(result)]
    if result["suite"] not in ("block", "deviation", "host"):
        parts.append(ratios(result))
    return "\n\n".join(part for part in [*parts, absent(result)] if part)
