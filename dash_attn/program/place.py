"""Placement: which worker runs which bundles. It fixes the speed and never the bits."""

from __future__ import annotations

import heapq

import numpy as np

from dash_attn.jit import compiled
from dash_attn.program.program import Longs, Program
from dash_attn.program.replay import FINISHED, Costs, Floats, Sequences, replay

# A chain's prologue and epilogue weigh about as much as this many tasks when bundles are balanced.
CHAIN_OVERHEAD = 2.5


def bundles(program: Program) -> Sequences:
    """The launch sequence as it stands in the program."""
    return Sequences(program.bundle_first, program.launch)


def place(program: Program, workers: int) -> Sequences:
    """Deal bundles to workers in launch order: in rotation, or each to the worker with the least work so far.

    Neither knows who waits for whom, so what they give is replayed. Where it would deadlock, a bundle goes to
    whichever worker is free when bundles start in launch order: as many workers as the order needs always do.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    dealt = _gather(program, np.arange(program.num_bundles) % workers, workers)
    rules = [_gather(program, _balanced(program, workers), workers)] if program.place == "balanced" else []
    for placed in (*rules, dealt):
        if replay(program, placed, Costs()).status == FINISHED:
            return placed
    # Seats are taken as in this very replay, so it is the proof too. With too few workers nothing would do.
    started = replay(program, bundles(program), Costs(), resident=workers)
    return dealt if started.resident > workers else _gather(program, started.seat, workers)


def _balanced(program: Program, workers: int) -> Longs:
    size = np.diff(program.task_first)[program.launch] + CHAIN_OVERHEAD
    owner: Longs = _least_loaded(np.add.reduceat(size, program.bundle_first[:-1]) if len(size) else size, workers)
    return owner


@compiled
def _least_loaded(work: Floats, workers: int) -> Longs:
    load = [(0.0, worker) for worker in range(workers)]
    owner = np.empty(len(work), np.int64)
    for bundle in range(len(work)):
        least, worker = load[0]
        owner[bundle] = worker
        heapq.heapreplace(load, (least + work[bundle], worker))
    return owner


def _gather(program: Program, owner: Longs, workers: int) -> Sequences:
    by_worker = np.argsort(owner, kind="stable")
    sizes = np.diff(program.bundle_first)
    begin = program.bundle_first[:-1][by_worker]
    length = sizes[by_worker]
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    chains = program.launch[np.repeat(begin, length) + within]
    per_worker = np.bincount(owner, weights=sizes, minlength=workers)
    return Sequences(np.concatenate([[0], np.cumsum(per_worker)]).astype(np.int32), chains.astype(np.int32))
