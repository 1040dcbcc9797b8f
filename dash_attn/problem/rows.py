"""Intervals of keys that are given row by row, as a hashable value."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dash_attn.problem.numbers import Longs, whole, whole_row


@dataclass(frozen=True)
class RowIntervals:
    """Query i sees keys first[i] .. end[i] - 1. `text` holds both arrays as int32 in base64.

    The value is part of a problem, so it is hashable. It is a text because torch.compile takes texts as constants.
    An empty interval is stored as (0, 0), so that masks with the same pairs are equal.
    """

    text: str

    @staticmethod
    def of(first: npt.ArrayLike, end: npt.ArrayLike) -> RowIntervals:
        lo, hi = (_whole(name, given) for name, given in (("first", first), ("end", end)))
        if lo.shape != hi.shape:
            raise ValueError(f"first and end must have one number for each query, got {len(lo)} and {len(hi)}")
        lo = np.maximum(lo, 0)
        both = np.where(hi > lo, np.stack([lo, hi]), 0)
        return RowIntervals(b64encode(both.astype("<i4").tobytes()).decode())

    @staticmethod
    def by(function: Callable[[int], tuple[int, int]], len_q: int) -> RowIntervals:
        queries = whole("len_q", len_q, "the number of queries, a whole number")
        if queries < 0:
            raise ValueError(f"len_q must be the number of queries, at least 0; got {queries}")
        pairs = [function(row) for row in range(queries)]
        for row, pair in enumerate(pairs):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ValueError(
                    f"the function of a row must return (first key, one past the last key), got {pair} for row {row}"
                )
        return RowIntervals.of([first for first, _ in pairs], [end for _, end in pairs])

    def read(self) -> tuple[Longs, Longs]:
        """first and end of every row."""
        first, end = np.frombuffer(b64decode(self.text), "<i4").reshape(2, -1).astype(np.int64)
        return first, end

    @property
    def count(self) -> int:
        """Number of rows. Both arrays have 4 bytes a row."""
        return (len(self.text) // 4 * 3 - self.text[-2:].count("=")) // 8

    def check_rows(self, len_q: int) -> None:
        if self.count != len_q:
            raise ValueError(f"the intervals of the mask are for {self.count} queries, not {len_q}")

    def __and__(self, other: RowIntervals) -> RowIntervals:
        if self == other:
            return self
        other.check_rows(self.count)
        (lo, hi), (other_lo, other_hi) = self.read(), other.read()
        return RowIntervals.of(np.maximum(lo, other_lo), np.minimum(hi, other_hi))


def _whole(name: str, given: npt.ArrayLike) -> Longs:
    return np.clip(whole_row(name, given, "have one whole number for each query"), -(2**31), 2**31 - 1)
