"""Stages: which keys travel together, and which panels of a rank can start when these keys have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_attn.backends import Extras
from dash_attn.distributed.layout import Layout, Range
from dash_attn.kept import kept
from dash_attn.problem import Panel, Problem


@kept()
def trips(problem: Problem, layout: Layout) -> tuple[Range, ...]:
    """The keys of a batch entry, cut into ranges that travel one after the other. All ranks cut alike.

    With zigzag each rank has a run of early keys and a run of late keys. Early keys travel first, if there is a panel
    that sees no late key. Otherwise all keys travel together.
    """
    length = problem.len_k
    if layout.name == "zigzag" and layout.ranks > 1:
        late, _ = layout.ranges(length)[layout.panels // 2]
        if late < length and any(0 < _last(panel, length) <= late for panel in problem.panel_list):
            return (0, late), (late, length)
    return ((0, length),)


def trip_rows(problem: Problem, layout: Layout) -> list[int]:
    """The rows of a batch entry that every rank sends in each trip: as many as the rank with the most."""
    spans = (layout.spans(problem.len_k, trip) for trip in trips(problem, layout))
    return [max(end - begin for begin, end in each) for each in spans]


@dataclass(frozen=True)
class Stage:
    """Panels of a rank that start together.

    trips    how many of the `trips` must have arrived. The panels see these keys and those of this rank alone
    numbers  the numbers of the panels among those of the rank
    panels   the panels. q_row counts the rows of this stage
    rows     their queries, among the rank's own queries flattened over the batch
    """

    trips: int
    numbers: tuple[int, ...]
    panels: tuple[Panel, ...]
    rows: tuple[Range, ...]

    @staticmethod
    def of(panels: Sequence[Panel], numbers: Sequence[int], trips: int) -> Stage:
        """Of the panels with these numbers. The panels are those of a rank, in ascending order of their queries."""
        own, rows, count = list[Panel](), list[Range](), 0
        for panel in (panels[number] for number in numbers):
            own.append(panel._replace(q_row=count))
            count += panel.len_q
            begin, end = panel.q_row, panel.q_row + panel.len_q
            if rows and rows[-1][1] == begin:
                begin, _ = rows.pop()
            rows.append((begin, end))
        return Stage(trips, tuple(numbers), tuple(own), tuple(rows))

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """The rows of this stage, of a tensor with all queries of the rank."""
        parts = [x.narrow(dim, begin, end - begin) for begin, end in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat([*parts, x.narrow(dim, 0, 0)], dim)

    def extras(self, given: Extras | None) -> Extras | None:
        """Of the rows of this stage, from those of all queries of the rank."""
        return given if given is None or given.dlse is None else given._replace(dlse=self.cut(given.dlse, 2))


class Result:
    """A tensor (batch, seqlen, heads, ...) of all queries of a rank, from parts.

    A part has the rows of one stage, flattened over the batch, and some heads: (1, rows, heads, ...). It is copied at
    once, so that the next part can have its memory. A part that has everything is not copied.
    """

    def __init__(self, batch: int, length: int, *others: int) -> None:
        self._shape, self._rows = (batch, length, *others), torch.Size((1, batch * length, *others))
        self._whole: Tensor | None = None

    def put(self, stage: Stage, heads: slice, part: Tensor) -> None:
        if part.shape == self._rows:
            self._whole = part
            return
        if self._whole is None:
            self._whole = part.new_empty(self._rows)
        pieces = torch.split(part, [end - begin for begin, end in stage.rows], 1)
        for (begin, end), piece in zip(stage.rows, pieces, strict=True):
            self._whole[:, begin:end, heads] = piece

    def whole(self) -> Tensor:
        assert self._whole is not None, "there is at least one stage"
        return self._whole.view(self._shape)


def stages_of(problem: Problem, layout: Layout, rank: int, panels: Sequence[Panel]) -> tuple[Stage, ...]:
    """The panels of a rank, in the order in which their keys arrive. There is at least one stage."""
    ends, held = [end for _, end in trips(problem, layout)], layout.held(problem.len_k, rank)
    waiting: dict[int, list[int]] = {}
    for number, panel in enumerate(panels):
        last = _last(panel, problem.len_k)
        first = last - panel.len_k
        for begin, end in reversed(held):
            if begin < last <= end:
                last = begin  # the keys from here on are those of this rank
        count = 1 + sum(end < last for end in ends) if first < last else 0
        waiting.setdefault(count, []).append(number)
    return tuple(Stage.of(panels, waiting[count], count) for count in sorted(waiting)) or (Stage.of((), (), 0),)


def _last(panel: Panel, length: int) -> int:
    """One past the last key of a panel, in its batch entry of `length` keys. 0 if it sees none."""
    return panel.k_row % length + panel.len_k if panel.len_k else 0
