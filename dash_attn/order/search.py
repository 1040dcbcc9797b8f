"""Orders for arbitrary masks: a list schedule on an ideal machine gives each task a time. Turns follow the times."""

from __future__ import annotations

import heapq

import numpy as np

from dash_attn.jit import compiled
from dash_attn.order.rules import Tasks, turns, windows
from dash_attn.order.types import Ints, Template
from dash_attn.tiling import Span, Tiling


def ranked(tiling: Tiling, width: int) -> tuple[Template, Ints, Ints]:
    """Longest chains first, in windows of `width` chains that start together.

    Every chain visits next a tile of its own that no other chain adds to at that moment, or else the tile that is free
    soonest. Returns the template, the chains as they are launched, and the window of each chain.
    """
    tasks, group = Tasks.of(tiling), tiling.heads
    head, q = tasks.head, tasks.q
    first = np.concatenate([[0], np.cumsum(tiling.spans[:, Span.COUNT] * group)])
    launch = np.lexsort((np.arange(tiling.num_kv), -tiling.spans[:, Span.COUNT]))
    cut = windows(tiling.num_kv, width)
    target = head * tiling.num_q + q
    visit, finish = _list_schedule(first, target, launch, np.searchsorted(cut, np.arange(cut.max(initial=-1) + 2)))
    window = np.empty_like(cut)
    window[launch] = cut
    # One chain at a time adds to a dQ tile, so (window, finish) ranks the contributions.
    place = window[tasks.chain] * (1 + finish.max(initial=0)) + finish
    return Template(first, head[visit], q[visit], turns(target[visit], place)), launch, window


@compiled
def _list_schedule(first: Ints, target: Ints, launch: Ints, cut: Ints) -> tuple[Ints, Ints]:
    """A task takes one unit of time, and a dQ tile has one visitor at a time. Returns the visit order and finish
    times."""
    total = len(target)
    visit, finish = np.empty(total, np.int64), np.empty(total, np.int64)
    following = np.arange(1, total + 1)  # the unvisited tasks of a chain, linked
    front = first[:-1].copy()
    done = first[:-1].copy()
    for w in range(len(cut) - 1):
        free = np.zeros(target.max() + 1 if total else 0, np.int64)
        queue = [(np.int64(0), i) for i in range(cut[w], cut[w + 1])]
        while len(queue) > 0:
            now, i = heapq.heappop(queue)
            chain = launch[i]
            if done[chain] == first[chain + 1]:
                continue
            best, before_best, before, task = -1, -1, -1, front[chain]
            while task < first[chain + 1]:
                if best < 0 or free[target[task]] < free[target[best]]:
                    best, before_best = task, before
                    if free[target[task]] <= now:
                        break
                before, task = task, following[task]
            if before_best < 0:
                front[chain] = following[best]
            else:
                following[before_best] = following[best]
            now = max(now, free[target[best]]) + 1
            free[target[best]] = now
            visit[done[chain]] = best
            finish[done[chain]] = now
            done[chain] += 1
            heapq.heappush(queue, (now, i))
    return visit, finish
