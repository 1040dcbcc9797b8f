"""Layouts: which tokens a rank holds.

The tokens are cut into `panels` ranges of equal length; the last ones may be shorter or empty. A rank holds whole
ranges, in ascending order. So the cut of the work, and with it every bit, is the same for every number of ranks with
the same `panels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dash_attn.lazily import cached_property

LAYOUTS = ("zigzag", "contiguous")
MODES = ("a2a", "all_gather", "a2a+all_gather")

USUAL_PANELS = 16

Range = tuple[int, int]  # first row, and the row behind the last


def usual_panels(ranks: int) -> int:
    """16, which 1, 2, 4 and 8 ranks share. For other numbers of ranks the least multiple of 2 * ranks from 16 on."""
    return -(-USUAL_PANELS // (2 * ranks)) * 2 * ranks


@dataclass(frozen=True)
class Layout:
    """Which of the ranges each rank holds.

    contiguous  neighbours: rank 0 holds the first ranges, the last rank the last ones
    zigzag      an early and a late run of neighbours: rank 0 holds the first and the last ranges. Under a causal mask
                late queries see many keys and early ones few, so all ranks have the same work
    """

    name: str
    ranks: int
    panels: int

    def __post_init__(self) -> None:
        if self.name not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.name!r}")
        if isinstance(self.panels, bool) or not isinstance(self.panels, int) or self.panels < 1:
            raise ValueError(f"panels must be a whole number from 1, got {self.panels!r}")
        parts = self.ranks if self.name == "contiguous" or self.ranks == 1 else 2 * self.ranks
        if self.panels % parts:
            raise ValueError(
                f"panels must be a multiple of {parts} for layout {self.name!r} on {self.ranks} ranks; got "
                f"{self.panels}"
            )

    @cached_property
    def holder(self) -> tuple[int, ...]:
        """The rank that holds each range."""
        if self.name == "contiguous":
            return tuple(i * self.ranks // self.panels for i in range(self.panels))
        runs = (i * 2 * self.ranks // self.panels for i in range(self.panels))
        return tuple(min(run, 2 * self.ranks - 1 - run) for run in runs)

    @cached_property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """The ranges of each rank."""
        own: list[list[int]] = [[] for _ in range(self.ranks)]
        for number, rank in enumerate(self.holder):
            own[rank].append(number)
        return tuple(map(tuple, own))

    def ranges(self, length: int) -> list[Range]:
        """All ranges of `length` tokens."""
        size = -(-length // self.panels)
        return [(min(i * size, length), min((i + 1) * size, length)) for i in range(self.panels)]

    def held(self, length: int, rank: int) -> tuple[Range, ...]:
        """The tokens of a rank. Neighbouring ranges are joined, and empty ones left out."""
        return self._held(length)[rank]

    @lru_cache(maxsize=256)  # noqa: B019 - layouts are few and small
    def _held(self, length: int) -> tuple[tuple[Range, ...], ...]:
        """Of every rank."""
        ranges, every = self.ranges(length), list[tuple[Range, ...]]()
        for numbers in self.numbers:
            joined = list[Range]()
            for begin, end in (ranges[i] for i in numbers):
                if joined and joined[-1][1] == begin:
                    joined[-1] = joined[-1][0], end
                elif begin < end:
                    joined.append((begin, end))
            every.append(tuple(joined))
        return tuple(every)

    def lengths(self, length: int) -> list[int]:
        """The number of tokens of each rank."""
        return [sum(end - begin for begin, end in self.held(length, rank)) for rank in range(self.ranks)]

    def rows(self, length: int, rank: int, part: Range) -> list[tuple[Range, Range]]:
        """The tokens of a part of the sequence that a rank holds, and the place of each range among the rank's own."""
        rows, first = list[tuple[Range, Range]](), 0
        for begin, end in self.held(length, rank):
            low, high = max(begin, part[0]), min(end, part[1])
            if low < high:
                rows.append(((low, high), (first + low - begin, first + high - begin)))
            first += end - begin
        return rows

    @lru_cache(maxsize=256)  # noqa: B019 - layouts are few and small
    def spans(self, length: int, part: Range) -> tuple[Range, ...]:
        """For each rank: which of its own rows are tokens of a part of the sequence. They are neighbours."""
        every = [[own for _, own in self.rows(length, rank, part)] for rank in range(self.ranks)]
        return tuple((rows[0][0], rows[-1][1]) if rows else (0, 0) for rows in every)

    @lru_cache(maxsize=256)  # noqa: B019 - layouts are few and small
    def pieces(self, length: int, part: Range | None = None) -> tuple[tuple[int, Range], ...]:
        """The tokens in ascending order, in pieces: the rank that holds a piece, and its rows among the rank's own.

        With `part`, only the tokens of this part.
        """
        part = part or (0, length)
        pieces = ((tokens, rank, own) for rank in range(self.ranks) for tokens, own in self.rows(length, rank, part))
        return tuple((rank, own) for _, rank, own in sorted(pieces))
