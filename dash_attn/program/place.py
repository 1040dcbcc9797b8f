"""Placement: which worker runs which bundles. It fixes the speed and never the bits."""

from __future__ import annotations

import heapq

import numpy as np

from dash_attn.program.program import Program
from dash_attn.program.replay import FINISHED, Costs, Sequences, replay

# A chain's prologue and epilogue weigh about as much as this many tasks when bundles are balanced.
CHAIN_OVERHEAD = 2.5


def bundles(program: Program) -> Sequences:
    """The launch sequence as it stands in the program."""
    return Sequences(program.bundle_first, program.launch)


def place(program: Program, workers: int) -> Sequences:
    """Deal bundles to workers in launch order: in rotation, or each to the worker with the least work so far.

    With as many workers as the order needs co-resident, rotation cannot deadlock; balancing could, so what it
    gives is replayed and rotation taken instead if it would.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if program.place == "balanced":
        placed = _gather(program, _balanced(program, workers), workers)
        if replay(program, placed, Costs()).status == FINISHED:
            return placed
    return _gather(program, np.arange(program.num_bundles) % workers, workers)


def _balanced(program: Program, workers: int) -> np.ndarray:
    size = np.diff(program.task_first)[program.launch] + CHAIN_OVERHEAD
    work = np.add.reduceat(size, program.bundle_first[:-1]) if program.num_bundles else size
    load = [(0.0, worker) for worker in range(workers)]
    owner = np.empty(program.num_bundles, np.int64)
    for bundle, cost in enumerate(work.tolist()):
        least, worker = load[0]
        owner[bundle] = worker
        heapq.heapreplace(load, (least + cost, worker))
    return owner


def _gather(program: Program, owner: np.ndarray, workers: int) -> Sequences:
    by_worker = np.argsort(owner, kind="stable")
    sizes = np.diff(program.bundle_first)
    begin = program.bundle_first[:-1][by_worker]
    length = sizes[by_worker]
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    chains = program.launch[np.repeat(begin, length) + within]
    per_worker = np.bincount(owner, weights=sizes, minlength=workers)
    return Sequences(np.concatenate([[0], np.cumsum(per_worker)]).astype(np.int32), chains.astype(np.int32))
