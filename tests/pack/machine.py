"""A slow reader of a pack's tables: workers draw tickets in order, and wait at turnstiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from dash_attn.pack import Assembly, Doc, PackedChain
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


def ticket_tasks(assembly: Assembly, ticket: int) -> Iterator[PackedTask]:
    """The tasks of a ticket, as a worker runs them."""
    docs, sizes = assembly.docs.tolist(), assembly.sizes
    number = max(d for d, doc in enumerate(docs) if doc[Doc.BUNDLES] and doc[Doc.TICKET] <= ticket)
    doc = docs[number]
    panel, bundle = divmod(ticket - doc[Doc.TICKET], doc[Doc.BUNDLES])
    assert panel < doc[Doc.PANELS]
    first, count = assembly.bundles[doc[Doc.BUNDLE] + bundle].tolist()
    for chain in assembly.chains[first : first + count].tolist():
        begin = chain[PackedChain.FIRST_RUN]
        for run in assembly.runs[begin : begin + chain[PackedChain.NUM_RUNS]].tolist():
            for i in range(run[Run.COUNT]):
                q_tile, kv_tile = run[Run.FIRST_Q] + i * run[Run.STEP], chain[PackedChain.KV_TILE]
                yield PackedTask(
                    number,
                    panel * sizes.heads + run[Run.HEAD],
                    q_tile,
                    kv_tile,
                    run[Run.TURN] + i * run[Run.TURN_STEP],
                    bool(run[Run.PARTIAL]),
                    _rows(assembly.q_tiles[doc[Doc.Q_TILE] + q_tile].tolist()),
                    _rows(assembly.kv_tiles[doc[Doc.KV_TILE] + kv_tile].tolist()),
                )


def play(assembly: Assembly, workers: int) -> list[PackedTask]:
    """All tasks in an order in which they can run. An AssertionError means that all workers wait for ever."""
    waiting = [list(ticket_tasks(assembly, ticket))[::-1] for ticket in range(assembly.tickets)][::-1]
    running: list[list[PackedTask]] = []
    done: list[PackedTask] = []
    served: Counter[tuple[int, int, int]] = Counter()
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(waiting.pop())
        before = len(done), -len(running)
        for tasks in running:
            while tasks and served[tasks[-1][:3]] == tasks[-1].turn:
                served[tasks[-1][:3]] += 1
                done.append(tasks.pop())
        running = [tasks for tasks in running if tasks]
        assert (len(done), -len(running)) > before, "every worker waits for ever"
    return done


def _rows(tile: list[int]) -> tuple[int, int]:
    return tile[0], tile[0] + tile[1]
