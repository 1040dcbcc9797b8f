"""Placement: which worker runs which bundles. It fixes the speed and never the bits."""

from __future__ import annotations

import heapq

import numpy as np

from dash_attn.jit import compiled
from dash_attn.program.program import Longs, Program
from dash_attn.program.replay import FINISHED, Costs, Sequences, replay

# A chain's prologue and epilogue weigh about as much as this many tasks when bundles are balanced. A power of two, so
# that sums are exact and workers whose bundles are equal stay level.
CHAIN_OVERHEAD = 0.5
# By which the faster of two placements is told, in tasks: near enough to any machine where they differ much.
NOMINAL = Costs(compute=1.0, reduce=0.5, handoff=0.5, depth=2, writers=2)


def bundles(program: Program) -> Sequences:
    """The launch sequence as it stands in the program."""
    return Sequences(program.bundle_first, program.launch)


def place(program: Program, workers: int, co_resident: int | None = None) -> Sequences:
    """Deal bundles to workers in launch order: in rotation, or each to the worker with the least work so far, or
    whichever of these is faster, for orders whose chains wait more than they work.

    Neither knows who waits for whom, so what they give is replayed. Where it would deadlock, a bundle goes to
    whichever worker is free when bundles start in launch order: as many workers as the order needs always do.

    An order that is known to need one worker is not replayed again: its bundles wait only for earlier ones, and a
    worker takes its own up in launch order. So the earliest that is not done always has its turn.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    dealt = np.arange(program.num_bundles) % workers
    owners = (dealt,) if program.place == "dealt" else (_balanced(program, workers), dealt)
    candidates = [_gather(program, owner, workers) for owner in owners]
    if program.place == "faster":
        candidates.sort(key=lambda each: float(replay(program, each, NOMINAL).totals[:, 0].max(initial=0.0)))
    for placed in candidates:
        if co_resident == 1 or replay(program, placed, None).status == FINISHED:
            return placed
    # Seats are taken as in this very replay, so it is the proof too. With too few workers nothing would do.
    started = replay(program, bundles(program), None, resident=workers)
    return placed if started.resident > workers else _gather(program, started.seat, workers)


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
