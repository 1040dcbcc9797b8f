"""A slow reader of a pack's tables: workers draw tickets in order, and wait at the turnstiles of dQ, dK and dV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dash_attn.pack import Assembly, Doc, PackedChain, Sizes
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


def ticket_steps(assembly: Assembly, ticket: int) -> Iterator[PackedTask | ChainEnd]:
    """The tasks and the ends of chains of a ticket, as a worker runs them."""
    docs, sizes = assembly.docs.tolist(), assembly.sizes
    number = max(d for d, doc in enumerate(docs) if doc[Doc.BUNDLES] and doc[Doc.TICKET] <= ticket)
    doc = docs[number]
    panel, bundle = divmod(ticket - doc[Doc.TICKET], doc[Doc.BUNDLES])
    assert panel < doc[Doc.PANELS]
    q_head, group = first_q_head(sizes, doc[Doc.PANELS], panel), sizes.heads_q // sizes.heads_kv
    turn = q_head % group  # with whole groups 0: every panel begins a group
    first, count = assembly.bundles[doc[Doc.BUNDLE] + bundle].tolist()
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


def play(assembly: Assembly, workers: int, drawn: Sequence[int] | None = None) -> list[PackedTask]:
    """All tasks in an order in which they can run. An AssertionError means that all workers wait for ever.

    Tickets are drawn in ascending order, or in the order `drawn`.
    """
    order = range(assembly.tickets) if drawn is None else drawn
    waiting = [list(ticket_steps(assembly, ticket))[::-1] for ticket in order][::-1]
    running: list[list[PackedTask | ChainEnd]] = []
    done: list[PackedTask] = []
    served: Counter[tuple[type, int, int, int]] = Counter()
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(waiting.pop())
        moved = False
        for steps in running:
            while steps and served[sum_of(steps[-1])] == steps[-1].turn:
                step = steps.pop()
                served[sum_of(step)] += 1
                moved = True
                if isinstance(step, PackedTask):
                    done.append(step)
        running = [steps for steps in running if steps]
        assert moved, "every worker waits for ever"
    return done


def sum_of(step: PackedTask | ChainEnd) -> tuple[type, int, int, int]:
    """The dQ tile that a task adds to, or the dK and dV tile that a chain adds to."""
    return type(step), *step[:3]


def _rows(tile: list[int]) -> tuple[int, int]:
    return tile[0], tile[0] + tile[1]
