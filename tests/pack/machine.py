"""A slow reader of a pack's tables: workers draw tickets in order, and wait at the turnstiles of dQ, dK and dV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dash_attn.pack import Assembly, Doc, PackedBundle, PackedChain, Round, Sizes
from dash_attn.program import Run


class PackedTask(NamedTuple):
    """A task with its rows in the flattened tensors."""

    doc: int
    q_head: int
    q_tile: int
    kv_tile: int
    turn: int
    partial: bool
    q_rows: tuple[int, int]
    k_rows: tuple[int, int]


class ChainEnd(NamedTuple):
    """A chain adds its dK and dV. A cut chain does so after the chain of the q head before it in its group."""

    doc: int
    kv_head: int
    kv_tile: int
    turn: int


def first_q_head(sizes: Sizes, panels: int, panel: int) -> int:
    """The first q head of a panel: see Doc."""
    group = sizes.heads_q // sizes.heads_kv
    if panels == sizes.heads_kv:
        return panel * group
    return (panel % sizes.heads_kv) * group + panel // sizes.heads_kv


def place_of(assembly: Assembly, ticket: int) -> tuple[int, int, int]:
    """The sequence, the panel and the row of `bundles` of a ticket."""
    row = assembly.rounds[np.searchsorted(assembly.rounds[:, Round.TICKET], ticket, side="right") - 1].tolist()
    panel, bundle = divmod(ticket - row[Round.TICKET], row[Round.BUNDLES])
    assert panel < assembly.docs[row[Round.DOC], Doc.PANELS]
    return row[Round.DOC], panel, row[Round.BUNDLE] + bundle


def ticket_steps(assembly: Assembly, ticket: int) -> Iterator[PackedTask | ChainEnd]:
    """The tasks and the ends of chains of a ticket, as a worker runs them."""
    number, panel, bundle = place_of(assembly, ticket)
    doc, sizes = assembly.docs[number].tolist(), assembly.sizes
    q_head, group = first_q_head(sizes, doc[Doc.PANELS], panel), sizes.heads_q // sizes.heads_kv
    turn = q_head % group  # with whole groups 0: every panel begins a group
    first, count, _ = assembly.bundles[bundle].tolist()
    for chain in assembly.chains[first : first + count].tolist():
        begin, kv_tile = chain[PackedChain.FIRST_RUN], chain[PackedChain.KV_TILE]
        for run in assembly.runs[begin : begin + chain[PackedChain.NUM_RUNS]].tolist():
            for i in range(run[Run.COUNT]):
                q_tile = run[Run.FIRST_Q] + i * run[Run.STEP]
                yield PackedTask(
                    number,
                    q_head + run[Run.HEAD],
                    q_tile,
                    kv_tile,
                    run[Run.TURN] + i * run[Run.TURN_STEP],
                    bool(run[Run.PARTIAL]),
                    _rows(assembly.q_tiles[doc[Doc.Q_TILE] + q_tile].tolist()),
                    _rows(assembly.kv_tiles[doc[Doc.KV_TILE] + kv_tile].tolist()),
                )
        yield ChainEnd(number, q_head // group, kv_tile, turn)


AHEAD = 3  # tickets that a worker holds at most: it draws a ticket while it still works on the ones before


def play(assembly: Assembly, workers: int, drawn: Sequence[int] | None = None) -> list[PackedTask]:
    """All tasks in an order in which they can run. An AssertionError means that all workers wait for ever.

    Tickets are drawn in ascending order, or in the order `drawn`. The first worker draws whenever it may, then the
    second, and so on.
    """
    order = list(range(assembly.tickets) if drawn is None else drawn)
    held: list[list[list[PackedTask | ChainEnd]]] = [[] for _ in range(workers)]
    awaited = [-1] * workers
    done: list[PackedTask] = []
    served: Counter[tuple[type, int, int, int]] = Counter()
    count = 0

    def draw(worker: int) -> None:
        nonlocal count
        ticket = order[count]
        held[worker].append(list(ticket_steps(assembly, ticket))[::-1])
        awaited[worker] = count + int(assembly.bundles[place_of(assembly, ticket)[2], PackedBundle.AWAITS])
        count += 1

    for worker in range(min(workers, len(order))):
        draw(worker)
    while any(held):
        moved = False
        for worker, queue in enumerate(held):
            while queue and count < len(order) and len(queue) < AHEAD and awaited[worker] < count:
                draw(worker)
            while queue and served[sum_of(queue[0][-1])] == queue[0][-1].turn:
                step = queue[0].pop()
                served[sum_of(step)] += 1
                moved = True
                if isinstance(step, PackedTask):
                    done.append(step)
                if not queue[0]:
                    queue.pop(0)
            if not queue and count < len(order):
                draw(worker)
                moved = True
        assert moved, "every worker waits for ever"
    return done


def sum_of(step: PackedTask | ChainEnd) -> tuple[type, int, int, int]:
    """The dQ tile that a task adds to, or the dK and dV tile that a chain adds to."""
    return type(step), *step[:3]


def _rows(tile: list[int]) -> tuple[int, int]:
    return tile[0], tile[0] + tile[1]
