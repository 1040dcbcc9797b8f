"""From an order's rules to its tasks: sort visits inside chains, rank contributions inside dQ tiles.

No rule here knows a number of workers. Turns come from step counts in an ideal machine that runs a whole window
at once, one task a step, so the order, and with it every bit of the result, is the same on every GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dash_attn.schedule.types import Ints, Template
from dash_attn.tiling import Tiling


@dataclass(frozen=True, eq=False)
class Tasks:
    """All tasks of one group, in no particular order."""

    chain: Ints
    head: Ints
    q: Ints

    @staticmethod
    def of(tiling: Tiling) -> Tasks:
        group = tiling.problem.group
        chain, q = np.nonzero(tiling.state)
        return Tasks(
            np.tile(chain, group).astype(np.int64),
            np.repeat(np.arange(group), len(chain)),
            np.tile(q, group).astype(np.int64),
        )


@dataclass(frozen=True, eq=False)
class Rules:
    """`visit`: tasks of a chain run in ascending order of it. Contributions to a dQ tile are ranked by window of
    their chain, then (if by_arrival) by the step at which the task runs, then by the chain's `rank`. `start` is
    the step at which a chain begins inside its window."""

    visit: Ints
    rank: Ints
    window: Ints | None = None
    by_arrival: bool = False
    start: Ints | None = None


def order(tiling: Tiling, tasks: Tasks, rules: Rules) -> Template:
    """Apply the rules: one template."""
    num_kv, total = tiling.num_kv, len(tasks.chain)
    sequence = np.argsort(tasks.chain * (1 + rules.visit.max(initial=0)) + rules.visit)
    chain, head, q = tasks.chain[sequence], tasks.head[sequence], tasks.q[sequence]
    first = np.concatenate([[0], np.cumsum(np.bincount(chain, minlength=num_kv))])

    arrival = np.zeros(total, np.int64)
    if rules.by_arrival:
        arrival = np.arange(total) - first[chain] + (0 if rules.start is None else rules.start[chain])
    window = 0 if rules.window is None else rules.window[chain]
    place = (window * (1 + arrival.max(initial=0)) + arrival) * num_kv + rules.rank[chain]
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
    """Cut `count` neighbours into windows of at most `width`, as equal as can be; the window of each."""
    parts = max(1, -(-count // width))
    return np.arange(count) * parts // max(count, 1)


def offsets(window: Ints, length: int) -> Ints:
    """Where each member of a window starts on a circle of `length`, spread evenly: the most slack there is."""
    size = np.bincount(window)[window] if len(window) else window
    local = np.arange(len(window)) - np.searchsorted(window, window)
    return local * length // np.maximum(size, 1)
