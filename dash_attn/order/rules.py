"""From a policy's rules to a template: sort visits inside chains, rank contributions inside dQ tiles.

No rule knows a number of workers. Turns come from step counts in an ideal machine that runs a whole window at once,
one task a step. So the order, and with it every bit of the result, is the same on every GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dash_attn.order.types import Ints, Template
from dash_attn.tiling import Span, TileState, Tiling


@dataclass(frozen=True, eq=False)
class Tasks:
    """All tasks of one panel, sorted by chain, then by query head, then by q tile."""

    chain: Ints
    head: Ints
    q: Ints

    @staticmethod
    def of(tiling: Tiling) -> Tasks:
        touched = np.repeat(tiling.state != TileState.EMPTY, tiling.heads, axis=0)
        count = np.repeat(tiling.spans[:, Span.COUNT], tiling.heads)
        row = np.repeat(np.arange(len(touched)), count)  # a chain and a query head
        chain, head = (np.repeat(each, count) for each in np.divmod(np.arange(len(touched)), tiling.heads))
        return Tasks(chain, head, np.flatnonzero(touched) - row * tiling.num_q)


@dataclass(frozen=True, eq=False)
class Rules:
    """What sorts tasks and contributions.

    Tasks of a chain run by ascending `visit`. Contributions to a dQ tile are ranked by the window of their chain, then
    (if `by_arrival`) by the step at which the task runs, then by the `rank` of their chain. `start` is the step at
    which a chain begins inside its window.
    """

    visit: Ints
    rank: Ints
    window: Ints | None = None
    by_arrival: bool = False
    start: Ints | None = None


def apply(tiling: Tiling, tasks: Tasks, rules: Rules) -> Template:
    """The template that the rules give."""
    num_kv, chain, head, q = tiling.num_kv, tasks.chain, tasks.head, tasks.q
    if ((chain[1:] == chain[:-1]) & (rules.visit[1:] < rules.visit[:-1])).any():
        place = chain * (1 + rules.visit.max(initial=0)) + rules.visit
        sequence = np.argsort(place, kind="stable")  # fast where long runs are already sorted, up or down
        head, q = head[sequence], q[sequence]  # chains stay in their places
    first = np.concatenate([[0], np.cumsum(tiling.spans[:, Span.COUNT] * tiling.heads)])
    window = np.zeros(num_kv, np.int64) if rules.window is None else rules.window
    if not rules.by_arrival:
        # Chains contribute one after the other. The turn is the number of earlier chains that visit the q tile.
        before, turn = np.zeros(tiling.num_q, np.int32), np.empty(tiling.state.shape, np.int32)
        for each in np.lexsort((rules.rank, window)):
            turn[each] = before
            before += tiling.state[each] != TileState.EMPTY
        return Template(first, head, q, turn.reshape(-1).take(chain * tiling.num_q + q).astype(np.int64))
    arrival = np.arange(len(chain)) - first[chain] + (0 if rules.start is None else rules.start[chain])
    place = (window[chain] * (1 + arrival.max(initial=0)) + arrival) * num_kv + rules.rank[chain]
    return Template(first, head, q, turns(head * tiling.num_q + q, place))


def turns(target: Ints, place: Ints) -> Ints:
    """Rank each contribution among those with the same target, by ascending place."""
    by_target = np.argsort(target * (1 + place.max(initial=0)) + place)
    grouped = target[by_target]
    begin = np.flatnonzero(np.concatenate([[True], grouped[1:] != grouped[:-1]])) if len(grouped) else grouped
    position = np.arange(len(target))
    turn = np.empty_like(target)
    turn[by_target] = position - np.repeat(position[begin], np.diff([*begin, len(target)]))
    return turn


def windows(count: int, width: int) -> Ints:
    """The window of each of `count` neighbours: windows have at most `width` members, and nearly equal sizes."""
    parts = max(1, -(-count // width))
    return np.arange(count) * parts // max(count, 1)


def offsets(window: Ints, length: int) -> Ints:
    """Where each member of a window starts on a circle of `length`. The starts are evenly spread, which leaves most
    time to hand turns on."""
    size = np.bincount(window)[window] if len(window) else window
    local = np.arange(len(window)) - np.searchsorted(window, window)
    return local * length // np.maximum(size, 1)
