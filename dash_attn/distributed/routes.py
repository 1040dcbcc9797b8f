"""Routes: which rows of which panel's dK and dV travel to which rank, and in which order they are added there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from dash_attn.distributed.layout import Layout, Range
from dash_attn.kept import kept
from dash_attn.problem import Panel, Problem


@dataclass(frozen=True)
class Addend:
    """Rows that travel: those of one panel that one rank holds.

    source  the rank that computes the panel
    panel   its number among the panels of that rank
    rows    keys, counted from the first key of the panel
    first   the first of these rows among all rows that travel from this source to this rank
    """

    source: int
    panel: int
    rows: Range
    first: int

    @property
    def count(self) -> int:
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class Sum:
    """Keys of one sequence that one rank holds, and the addends that are added there: last queries first.

    `rows` are counted in the rank's own tensor, flattened over the batch. All addends begin at the first of these keys.
    The first addend has all of them.
    """

    rows: Range
    addends: tuple[Addend, ...]


@dataclass(frozen=True)
class Routes:
    """The routes of one rank.

    panels    its panels. q_row counts its own rows, flattened over the batch
    sums      the sums over its own keys. Keys outside of all sums have gradient 0
    sent      for each rank, the addends that travel there
    received  for each rank, the number of rows that come from there
    """

    panels: tuple[Panel, ...]
    sums: tuple[Sum, ...]
    sent: tuple[tuple[Addend, ...], ...]
    received: tuple[int, ...]

    @staticmethod
    def of(problem: Problem, layout: Layout, rank: int) -> Routes:
        panels, place = _panels(problem, layout)
        # All addends between all ranks would be many: those to this rank, and those from it, are enough.
        mine = {sequence: [each for each in every if each[0] == rank] for sequence, every in place.items()}
        sent = [
            [addend for each in _sums(problem, layout, mine, to) for addend in each.addends]
            for to in range(layout.ranks)
        ]
        sums, received = _sums(problem, layout, place, rank), [0] * layout.ranks
        for addend in (addend for each in sums for addend in each.addends):
            received[addend.source] += addend.count
        return Routes(panels[rank], _joined(sums), tuple(map(tuple, sent)), tuple(received))


@kept()
def _panels(
    problem: Problem, layout: Layout
) -> tuple[tuple[tuple[Panel, ...], ...], dict[int, list[tuple[int, int, Panel]]]]:
    """The panels of each rank, and for each sequence its panels with rank and number, last queries first."""
    size = max(1, -(-problem.len_q // layout.panels))
    firsts = _firsts(problem.len_q, layout)
    lengths = layout.lengths(problem.len_q)
    panels: list[list[Panel]] = [[] for _ in range(layout.ranks)]
    place: dict[int, list[tuple[int, int, Panel]]] = {}
    for panel in problem.panel_list:
        if panel.len_q:
            batch, row = divmod(panel.q_row, problem.len_q)
            number = row // size
            rank = layout.holder[number]
            own = batch * lengths[rank] + firsts[number] + row - number * size
            place.setdefault(panel.sequence, []).insert(0, (rank, len(panels[rank]), panel))
            panels[rank].append(panel._replace(q_row=own))
    return tuple(map(tuple, panels)), place


def _firsts(length: int, layout: Layout) -> list[int]:
    """The first row of each range among the rows of its rank."""
    ranges, firsts = layout.ranges(length), [0] * layout.panels
    for numbers in layout.numbers:
        counts = [ranges[i][1] - ranges[i][0] for i in numbers]
        for i, first in zip(numbers, accumulate(counts, initial=0), strict=False):
            firsts[i] = first
    return firsts


def _sums(problem: Problem, layout: Layout, place: dict[int, list[tuple[int, int, Panel]]], to: int) -> tuple[Sum, ...]:
    """The sums over the keys of rank `to`, of the panels in `place`, in ascending order of its rows."""
    length = sum(end - begin for begin, end in layout.held(problem.len_k, to))
    counts, sums = [0] * layout.ranks, list[Sum]()
    for number, sequence in enumerate(problem.sequences):
        batch, begin = divmod(sequence.k_row, problem.len_k) if problem.len_k else (0, 0)
        for rows, (own, _) in layout.rows(problem.len_k, to, (begin, begin + sequence.len_k)):
            addends = list[Addend]()
            for source, panel_number, panel in place.get(number, ()):
                count = min(rows[1], begin + panel.len_k) - rows[0]
                if count > 0:
                    first = rows[0] - begin
                    addends.append(Addend(source, panel_number, (first, first + count), counts[source]))
                    counts[source] += count
            if addends:
                first = batch * length + own
                sums.append(Sum((first, first + rows[1] - rows[0]), tuple(addends)))
    return tuple(sums)


def _joined(sums: tuple[Sum, ...]) -> tuple[Sum, ...]:
    """Neighbouring sums of one addend each, from one rank, as one sum. A pack of short documents has many of them."""
    joined = list[Sum]()
    for each in sums:
        if joined and len(each.addends) == len(joined[-1].addends) == 1:
            (addend,), (last,) = each.addends, joined[-1].addends
            if (
                joined[-1].rows[1] == each.rows[0]
                and addend.source == last.source
                and last.first + last.count == addend.first
            ):
                rows = (last.rows[0], last.rows[1] + addend.count)
                joined[-1] = Sum((joined[-1].rows[0], each.rows[1]), (replace(last, rows=rows),))
                continue
        joined.append(each)
    return tuple(joined)
