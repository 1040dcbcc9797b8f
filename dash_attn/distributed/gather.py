"""Gather: the keys and values of some heads, on their way from all ranks to all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dash_attn.distributed.layout import Layout, Range
from dash_attn.distributed.ranks import Arrival, Axis
from dash_attn.distributed.stages import trip_rows, trips
from dash_attn.problem import Problem

Pair = tuple[Tensor, Tensor]  # keys and values


class Gather:
    """Starts to gather `own`, this rank's keys and values (batch, rows, heads, dim) of some heads of a problem.

    Each of the `trips` is one collective. All of them start at once, and arrive one after the other.
    """

    def __init__(self, axis: Axis, layout: Layout, problem: Problem, own: Pair) -> None:
        self._axis, self._layout, self._length, self._own = axis, layout, problem.len_k, own
        self._under_way = [
            self._start(*each) for each in zip(trips(problem, layout), trip_rows(problem, layout), strict=True)
        ]
        self._arrived, self._whole = 0, list[Tensor]()

    def after(self, count: int) -> Pair:
        """Wait for the first `count` trips: the rows of all ranks in ascending order, (1, rows, heads, dim).

        The rows of this rank are there too. The others hold anything.
        """
        if not self._whole:
            self._whole = [x.new_empty((x.shape[0], self._length, *x.shape[2:])) for x in self._own]
            if count < len(self._under_way):
                every = self._layout.rows(self._length, self._axis.number, (0, self._length))
                for whole, x in zip(self._whole, self._own, strict=True):
                    for tokens, rows in every:
                        whole[:, slice(*tokens)] = x[:, slice(*rows)]
        while self._arrived < count:
            arrive, place = self._under_way.pop(0)
            place(arrive())
            self._arrived += 1
        keys, values = (whole.flatten(0, 1).unsqueeze(0) for whole in self._whole)
        return keys, values

    def finish(self) -> None:
        """Wait for the trips that no panel of this rank has waited for, and free the memory."""
        for arrive, _ in self._under_way:
            arrive()
        self._under_way.clear()
        self._whole.clear()

    def _start(self, trip: Range, most: int) -> tuple[Arrival, Callable[[Tensor], None]]:
        """Start to gather some keys and values in one collective: what waits for them, and what puts them in place."""
        layout, length, ranks = self._layout, self._length, self._axis.size
        spans = layout.spans(length, trip)
        begin, end = spans[self._axis.number]
        shapes = [(x.shape[0], most, *x.shape[2:]) for x in self._own]
        sizes = [math.prod(shape) for shape in shapes]
        sent = self._own[0].new_empty(sum(sizes))
        for flat, shape, x in zip(torch.split(sent, sizes), shapes, self._own, strict=True):
            into = flat.view(shape)
            into[:, : end - begin] = x[:, begin:end]
            into[:, end - begin :] = 0
        arrival = self._axis.all_gather(sent)

        def place(arrived: Tensor) -> None:
            for flat, shape, whole in zip(torch.split(arrived, sizes, 1), shapes, self._whole, strict=True):
                parts = flat.view(ranks, *shape)
                pieces = [
                    parts[rank, :, first - spans[rank][0] : last - spans[rank][0]]
                    for rank, (first, last) in layout.pieces(length, trip)
                ]
                torch.cat(pieces, 1, out=whole[:, slice(*trip)])

        return arrival, place
