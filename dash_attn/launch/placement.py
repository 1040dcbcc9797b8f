"""Placement: which worker runs which bundles. It changes the speed and never a bit."""

from __future__ import annotations

import heapq

import numpy as np

from dash_attn.program import Costs, Program, Sequences, play
from dash_attn.program.program import Longs
from dash_attn.program.replay import FINISHED

# Balancing counts the prologue and epilogue of a chain as this share of a task. A power of two keeps sums exact, so
# that workers with equal bundles have equal sums.
CHAIN_OVERHEAD = 0.5
# The machine that decides which of two placements is faster. A task is the unit of time. If two placements differ much,
# every other machine decides in the same way.
NOMINAL = Costs(compute=1.0, reduce=0.5, handoff=0.5, depth=2, writers=2)


def place(program: Program, workers: int, rounds: Longs | None) -> Sequences:
    """Give bundles to workers in launch order, by the place rule of the program.

    `rounds` is the round of each bundle, from verification. `workers` must be at least `co_resident`. `Verified.on`
    checks this.

    The rules do not know which chain waits for which. A placement that gives the bundles of each round to different
    workers never deadlocks, because the earliest unfinished round is at work on all its workers. Any other placement is
    replayed before it is returned. If it would deadlock, bundles start in launch order, each on a free worker. This
    never deadlocks.
    """
    dealt = np.arange(program.num_bundles) % workers
    owners = [dealt] if program.place == "dealt" else [_balanced(program, workers), dealt]
    if program.place == "faster":
        owners.sort(key=lambda owner: play(program, _gather(program, owner, workers), NOMINAL).makespan)
    for owner in owners:
        placement = _gather(program, owner, workers)
        if _keeps_apart(rounds, owner, workers) or play(program, placement, None).status == FINISHED:
            return placement
    started = play(program, program.bundles, None, resident=workers)
    assert started.status == FINISHED and started.resident <= workers, "place() needs co_resident workers"
    return _gather(program, started.seat, workers)


def _balanced(program: Program, workers: int) -> Longs:
    """Give each bundle to the worker with the least work so far."""
    cost = np.diff(program.task_first)[program.launch] + CHAIN_OVERHEAD
    until = np.concatenate([[0.0], np.cumsum(cost)])
    load, owner = [(0.0, worker) for worker in range(workers)], []
    for work in np.diff(until[program.bundle_first]).tolist():
        done, worker = load[0]
        owner.append(worker)
        heapq.heapreplace(load, (done + work, worker))
    return np.array(owner, np.int64)


def _keeps_apart(rounds: Longs | None, owner: Longs, workers: int) -> bool:
    """Whether no two bundles of a round are on one worker."""
    return rounds is not None and len(np.unique(rounds * workers + owner)) == len(owner)


def _gather(program: Program, owner: Longs, workers: int) -> Sequences:
    """The chains of each worker. Bundles of one worker keep launch order."""
    of_chain = np.repeat(owner, np.diff(program.bundle_first))
    first = np.searchsorted(np.sort(of_chain), np.arange(workers + 1)).astype(np.int32)
    return Sequences(first, program.launch[np.argsort(of_chain, kind="stable")])
