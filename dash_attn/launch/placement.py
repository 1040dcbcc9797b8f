"""Placement: which worker runs which bundles. It changes the speed and never a bit."""

from __future__ import annotations

import heapq

import numpy as np

from dash_attn.jit import compiled
from dash_attn.program import Costs, Program, Sequences, play
from dash_attn.program.program import Longs
from dash_attn.program.replay import FINISHED

# The prologue and epilogue of a chain weigh as much as this many tasks when bundles are balanced. A power of two keeps
# sums exact, so that workers with equal bundles have equal sums.
CHAIN_OVERHEAD = 0.5
# The machine, with a task as the unit of time, that decides which of two placements is faster. Where two placements
# differ much, every machine agrees with it.
NOMINAL = Costs(compute=1.0, reduce=0.5, handoff=0.5, depth=2, writers=2)


def place(program: Program, workers: int, co_resident: int) -> Sequences:
    """Give bundles to workers in launch order, by the place rule of the program.

    `co_resident` is what verification gives, and `workers` must not be fewer: `Verified.on` sees to that.

    The rules do not know who waits for whom, so a placement is replayed before it is returned. Where it would deadlock,
    bundles are started in launch order instead, each on the worker that is free, which never deadlocks. An order that
    needs one worker needs no replay: its bundles wait only for earlier bundles, and every worker takes its own bundles
    in launch order, so the earliest unfinished bundle can always go on.
    """
    dealt = np.arange(program.num_bundles) % workers
    owners = (dealt,) if program.place == "dealt" else (_balanced(program, workers), dealt)
    candidates = [_gather(program, owner, workers) for owner in owners]
    if program.place == "faster":
        candidates.sort(key=lambda placement: play(program, placement, NOMINAL).makespan)
    for placement in candidates:
        if co_resident <= 1 or play(program, placement, None).status == FINISHED:
            return placement
    started = play(program, program.bundles, None, resident=workers)
    assert started.status == FINISHED and started.resident <= workers, "place() needs co_resident workers"
    return _gather(program, started.seat, workers)


def _balanced(program: Program, workers: int) -> Longs:
    owner: Longs = _least_loaded(program.bundle_first, program.launch, program.task_first, workers)
    return owner


@compiled
def _least_loaded(bundle_first, launch, task_first, workers):  # type: ignore[no-untyped-def]
    load = [(0.0, worker) for worker in range(workers)]
    owner = np.empty(len(bundle_first) - 1, np.int64)
    for bundle in range(len(owner)):
        work, worker = load[0]
        owner[bundle] = worker
        for chain in launch[bundle_first[bundle] : bundle_first[bundle + 1]]:
            work += task_first[chain + 1] - task_first[chain] + CHAIN_OVERHEAD
        heapq.heapreplace(load, (work, worker))
    return owner


def _gather(program: Program, owner: Longs, workers: int) -> Sequences:
    first, chains = np.zeros(workers + 1, np.int32), np.empty_like(program.launch)
    _fill(program.bundle_first, program.launch, owner, first, chains)
    return Sequences(first, chains)


@compiled
def _fill(bundle_first, launch, owner, first, chains):  # type: ignore[no-untyped-def]
    """Bundles of one worker keep launch order."""
    for bundle in range(len(owner)):
        first[owner[bundle] + 1] += bundle_first[bundle + 1] - bundle_first[bundle]
    for worker in range(len(first) - 1):
        first[worker + 1] += first[worker]
    at = first.copy()
    for bundle in range(len(owner)):
        for i in range(bundle_first[bundle], bundle_first[bundle + 1]):
            chains[at[owner[bundle]]] = launch[i]
            at[owner[bundle]] += 1
