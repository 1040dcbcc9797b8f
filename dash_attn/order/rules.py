"""From a policy's rules to a template: sort visits inside chains, rank contributions inside dQ tiles.

No rule knows a number of workers. Turns come from step counts in an ideal machine that runs a whole window at once,
one task a step. So the order, and with it every bit of the result, is the same on every GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dash_attn.jit import compiled
from dash_attn.order.types import Ints, Template
from dash_attn.tiling import Span, Tiling


@dataclass(frozen=True, eq=False)
class Tasks:
    """All tasks of one group, sorted by chain, then by query head, then by q tile."""

    chain: Ints
    head: Ints
    q: Ints

    @staticmethod
    def of(tiling: Tiling) -> Tasks:
        return Tasks(*_list_tasks(tiling.state, tiling.spans, tiling.heads))


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
    target = head * tiling.num_q + q
    window = np.zeros(num_kv, np.int64) if rules.window is None else rules.window
    if not rules.by_arrival:
        return Template(first, head, q, _count_up(np.lexsort((rules.rank, window)), first, target))
    arrival = np.arange(len(chain)) - first[chain] + (0 if rules.start is None else rules.start[chain])
    place = (window[chain] * (1 + arrival.max(initial=0)) + arrival) * num_kv + rules.rank[chain]
    return Template(first, head, q, turns(target, place))


@compiled
def _list_tasks(state, spans, group):  # type: ignore[no-untyped-def]
    total = group * spans[:, Span.COUNT].sum()
    chain, head, q = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    t = 0
    for kv in range(len(spans)):
        for h in range(group):
            for m in range(spans[kv, Span.FIRST], spans[kv, Span.END]):
                if state[kv, m] != 0:
                    chain[t], head[t], q[t] = kv, h, m
                    t += 1
    return chain, head, q


@compiled
def _count_up(chains, first, target):  # type: ignore[no-untyped-def]
    """Turns of chains that contribute one after the other."""
    turn = np.empty_like(target)
    counter = np.zeros(target.max() + 1 if len(target) else 0, np.int64)
    for chain in chains:
        for t in range(first[chain], first[chain + 1]):
            turn[t] = counter[target[t]]
            counter[target[t]] += 1
    return turn


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
    """Cut `count` neighbours into windows of at most `width`, as equal as possible; the window of each."""
    parts = max(1, -(-count // width))
    return np.arange(count) * parts // max(count, 1)


def offsets(window: Ints, length: int) -> Ints:
    """Where each member of a window starts on a circle of `length`: evenly spread, so that slack is largest."""
    size = np.bincount(window)[window] if len(window) else window
    local = np.arange(len(window)) - np.searchsorted(window, window)
    return local * length // np.maximum(size, 1)
