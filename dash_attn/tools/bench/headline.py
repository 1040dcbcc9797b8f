"""The headline: which measured rows stand beside FlashAttention-4, in which groups, under which names.

README, docs/performance.md and the page of all results show these groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from dash_attn.tools.bench.report import BASELINE, Against, Result, ResultRow, against

PEERS = {BASELINE: "FA4 deterministic", "fa4": "FA4 non-deterministic"}
HEADER = ["shapes", *(text for name in PEERS.values() for text in (f"mean vs {name}", "worst shape"))]
QUICK_US = 250.0  # the Python code of FlashAttention-4 can take as long


class Kind(NamedTuple):
    """A row of the headline: which rows of its suites it counts. In its name '{}' stands for how many these are."""

    name: str
    suites: tuple[str, ...]
    counts: Callable[[ResultRow], bool] = lambda row: True
    is_quick: bool = False  # whether it counts the quick rows, or the others


class Group(NamedTuple):
    """A row of the headline, with the speed-ups over the peers that were timed."""

    name: str
    suites: tuple[str, ...]
    over: Mapping[str, Against]

    @property
    def line(self) -> list[str]:
        """The cells below HEADER."""
        cells = [self.over[peer].texts if peer in self.over else ("-", "-") for peer in PEERS]
        return [self.name, *(text for pair in cells for text in pair)]


def _quick(row: ResultRow) -> bool:
    """Whether the time of FlashAttention-4 may be that of its Python code."""
    return "fa4" in row["us"] and float(row["us"]["fa4"]["median"]) < QUICK_US


def _featured(row: ResultRow) -> bool:
    """Whether the case has softcap or sinks."""
    return "features" in row["shape"]


def _late(row: ResultRow) -> bool:
    """Whether keys lie before the first query."""
    return int(row["shape"]["len_q"]) < int(row["shape"]["len_k"])


# The suite `grid` is not here: it mixes slow and fast orders, so its ratios scatter more than those of `grid_close`.
SLOW = (
    Kind("the grid of the paper ({} shapes)", ("grid_close",)),
    Kind("known models ({} shapes)", ("models",), lambda row: not _featured(row)),
    Kind("softcap and sinks ({} shapes)", ("models",), _featured),
    Kind("one sequence of 4k to 128k tokens ({} shapes)", ("length",)),
    Kind("few key/value heads ({} shapes)", ("few",), lambda row: not _late(row)),
    Kind("queries after many keys ({} shapes)", ("few",), _late),
    Kind("packed documents ({} packs)", ("packed",)),
    Kind("training steps with a new packing ({} kinds)", ("step",)),
)
EVERY = tuple(dict.fromkeys(suite for kind in SLOW for suite in kind.suites))
KINDS = (*SLOW, Kind("short calls: FA4 below 0.25 ms ({} shapes)", EVERY, is_quick=True))


def headline(results: Mapping[str, Result]) -> list[Group]:
    """The rows of the headline, from results by suite. A group in which no peer was timed is left out."""
    groups = []
    for kind in KINDS:
        suites = {suite: _counted(results[suite], kind) for suite in kind.suites if suite in results}
        rows = [row for counted in suites.values() for row in counted]
        over = {peer: made for peer in PEERS if (made := against(rows, peer)) is not None}
        if over:
            count = max(len(made.cells) for made in over.values())
            files = tuple(suite for suite, counted in suites.items() if counted)
            groups.append(Group(kind.name.format(count), files, over))
    return groups


def _counted(result: Result, kind: Kind) -> list[ResultRow]:
    return [row for row in result["rows"] if _quick(row) == kind.is_quick and kind.counts(row)]
