"""Replay: run the tasks of a Program without computing, to see which task waits for which, and when.

Turns and visit orders are fixed. So every task runs at the same time, whichever worker the loop advances first. The
loop needs no event queue and passes over the tasks once. `simulate` uses the loop, and so does
`verify` where an order does not show by itself who waits for whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dash_attn.jit import compiled
from dash_attn.program.program import Chain, Int32, Longs, Program, Run, Sequences

Floats = npt.NDArray[np.float64]

FINISHED, STUCK, PASSED = 0, 1, 2  # all done; nobody can move; a task comes after its turn


@dataclass(frozen=True)
class Costs:
    """Durations of a task's parts, the one form in which every model of time reaches the loop.

    depth 0: the worker itself adds its contribution and waits for it (the paper). depth b: `writers` warps add, from b
    buffers, while the worker computes the next task.
    """

    compute: float = 0.0
    partial: float = 0.0
    reduce: float = 0.0
    handoff: float = 0.0
    prologue: float = 0.0
    epilogue: float = 0.0
    depth: int = 0
    writers: int = 1
    store: float = 0.0  # not 0: the end of a chain takes a buffer too, and a writer for this long
    fetch: float = 0.0  # not 0: the last contributor of a tile takes the sum in, this long after its turn has come
    first: float = 1.0  # the first contribution of a tile is stored, not added: this share of `reduce`
    jitter: float = 0.0  # tasks are not equally long: standard deviation, as a share of compute

    def paces(self, tasks: int) -> Floats:
        """How long each task computes, as a multiple of the mean."""
        return 1 + self.jitter * _unlike(tasks) if self.jitter else np.ones(tasks)


@lru_cache(maxsize=4)
def _unlike(tasks: int) -> Floats:
    """Numbers of mean 0 and standard deviation 1. RandomState gives the same ones in every numpy."""
    return np.random.RandomState(0).uniform(-(3**0.5), 3**0.5, tasks)


class Total(IntEnum):
    """Columns of `Replay.totals`: when a sequence ended, and how long it was busy, stalled and blocked."""

    END = 0
    BUSY = 1
    STALL = 2
    BLOCKED = 3


NUM_TOTALS = len(Total)  # compiled loops cannot take the length of an enum


class When(IntEnum):
    """Rows of `Replay.times`: compute begins and ends, the writer is ready, the turn has come, the sum is written."""

    BEGIN = 0
    COMPUTED = 1
    READY = 2
    GRANTED = 3
    LANDED = 4


@dataclass(frozen=True, eq=False)
class Replay:
    """What became of the sequences.

    `resident` is how many sequences had to be resident at once, `seat` which of the resident places each took.
    `standing` says where each sequence stands: position in the chains, run, offset. With costs, `totals` has a row per
    sequence (columns Total); with costs and `record`, `times` has a column per task (rows When).
    """

    status: int
    resident: int
    seat: Longs
    standing: Longs
    totals: Floats
    times: Floats

    @property
    def makespan(self) -> float:
        return float(self.totals[:, Total.END].max(initial=0.0))


class _Tables(NamedTuple):
    """What the loop reads of a program."""

    chains: Int32
    runs: Int32
    target_base: Longs
    task_first: Longs
    contributors: Int32
    num_targets: int
    num_q: int


class _Times(NamedTuple):
    """What the loop reads of Costs, and the pace of each task."""

    compute: float
    partial: float
    reduce: float
    handoff: float
    prologue: float
    epilogue: float
    depth: int
    writers: int
    store: float
    fetch: float
    first: float
    paces: Floats


def play(
    program: Program, sequences: Sequences, costs: Costs | None, *, resident: int | None = None, record: bool = False
) -> Replay:
    """Advance all sequences until they are done or stuck. Without costs it only says whether they get done.

    With `resident`, sequences start in order: that many at first, the next one when one ends, and one more whenever
    nothing else can move. More residents never do harm, so the final count is the least that works.
    """
    tables = _Tables(
        program.chains,
        program.runs,
        program.target_base,
        program.task_first,
        program.contributors,
        program.geometry.num_targets,
        program.geometry.num_q,
    )
    total = len(sequences.first) - 1
    most = total if resident is None else min(resident, total)
    times = np.zeros((len(When), program.num_tasks if record and costs else 0))
    status, needed, seat, standing, totals = _advance(
        tables, sequences.first, sequences.chains, most, _times(costs, program.num_tasks), times
    )
    return Replay(status, needed, seat, standing, totals, times)


def _times(costs: Costs | None, tasks: int) -> _Times | None:
    if costs is None:
        return None
    durations = {name: float(getattr(costs, name)) for name in _Times._fields[:-1] if name not in ("depth", "writers")}
    return _Times(**durations, depth=costs.depth, writers=costs.writers, paces=costs.paces(tasks))


@compiled
def _advance(tables, seq_first, seq_chains, resident, costs, times):  # type: ignore[no-untyped-def]
    """The compiler leaves out what asks `costs is not None` where there are none."""
    chains, runs, base, task_first, contributors, num_targets, num_q = tables
    total = len(seq_first) - 1
    counter = np.zeros(num_targets, np.int32)
    waiter = np.full(num_targets, -1, np.int32)  # the sequences that wait at a turnstile, as a linked list
    next_waiter = np.full(total, -1, np.int32)
    wanted = np.zeros(total, np.int32)
    standing = np.full((total, 3), -1, np.int64)  # position in seq_chains, run, offset
    totals = np.zeros((0 if costs is None else total, NUM_TOTALS))
    if costs is not None:
        compute, partial_cost, reduce, handoff, prologue, epilogue = costs[:6]
        depth, writers, store, fetch, stored, paces = costs[6:]
        record = times.shape[1] > 0
        released = np.zeros(num_targets)  # when the last contribution so far was handed over
        paused = np.zeros(total, np.int64)  # the task number at which a sequence stands
        clock = np.zeros(total)
        tasks_done = np.zeros(total, np.int64)
        slot_free = np.zeros((total, max(depth, 1)))
        writer_free = np.zeros((total, max(writers, 1)))
    ready = np.empty(total, np.int32)
    num_ready, admitted, finished = 0, 0, 0
    seat, left = np.empty(total, np.int64), np.empty(total, np.int64)  # a sequence that ends leaves its seat
    num_seats, num_left = 0, 0
    for s in range(total):
        standing[s, 0] = seq_first[s]
    while finished < total:
        while admitted < total and admitted - finished < resident:
            if num_left > 0:
                num_left -= 1
                seat[admitted] = left[num_left]
            else:
                seat[admitted] = num_seats
                num_seats += 1
            ready[num_ready] = admitted
            num_ready += 1
            admitted += 1
        if num_ready == 0:
            if admitted == total:
                return STUCK, resident, seat, standing, totals
            resident += 1
            continue
        num_ready -= 1
        s = ready[num_ready]
        p, j, o = standing[s]
        if costs is not None:
            t = clock[s]
        waits = False
        while p < seq_first[s + 1]:
            c = seq_chains[p]
            end = chains[c, Chain.FIRST_RUN] + chains[c, Chain.NUM_RUNS]
            if costs is not None:
                task = task_first[c] if j < 0 else paused[s]
                done = tasks_done[s]
            if j < 0:
                j, o = chains[c, Chain.FIRST_RUN], 0
                if costs is not None:
                    t += prologue
                    totals[s, Total.BUSY] += prologue
            while j < end:
                first = base[c] + runs[j, Run.HEAD] * num_q + runs[j, Run.FIRST_Q]
                step, count, turn0, turn_step = (
                    runs[j, Run.STEP],
                    runs[j, Run.COUNT],
                    runs[j, Run.TURN],
                    runs[j, Run.TURN_STEP],
                )
                if costs is not None:
                    masking = partial_cost if runs[j, Run.PARTIAL] != 0 else 0.0
                while o < count:
                    target = first + step * o
                    turn = turn0 + turn_step * o
                    have = counter[target]
                    if have != turn:
                        standing[s, 0], standing[s, 1], standing[s, 2] = p, j, o
                        if costs is not None:
                            paused[s] = task
                        if have > turn:
                            return PASSED, resident, seat, standing[s : s + 1], totals
                        next_waiter[s] = waiter[target]
                        waiter[target] = s
                        wanted[s] = turn
                        waits = True
                        break
                    if costs is not None:
                        begin = t
                        own = compute * paces[task] + masking
                        stop = begin + own
                        writer_ready = stop
                        if depth == 0:
                            grant = max(stop, released[target])
                            landed = grant + reduce
                            totals[s, Total.BUSY] += own + reduce
                            totals[s, Total.STALL] += grant - stop
                            t = landed
                        else:
                            blocked = slot_free[s, done % depth] - stop
                            if fetch > 0 and 0 < turn == contributors[runs[j, Run.FIRST_Q] + step * o] - 1:
                                taken = max(slot_free[s, done % depth], writer_free[s, done % writers])
                                blocked = max(taken, released[target]) + fetch - stop
                            if blocked > 0:
                                totals[s, Total.BLOCKED] += blocked
                                stop += blocked
                            writer_ready = max(stop, writer_free[s, done % writers])
                            grant = max(writer_ready, released[target])
                            landed = grant + (reduce * stored if turn == 0 else reduce)
                            totals[s, Total.BUSY] += own
                            totals[s, Total.STALL] += grant - writer_ready
                            slot_free[s, done % depth] = landed
                            writer_free[s, done % writers] = landed
                            t = stop
                        totals[s, Total.END] = max(totals[s, Total.END], landed)
                        released[target] = landed + handoff
                        done += 1
                        if record:
                            times[When.BEGIN, task], times[When.COMPUTED, task] = begin, stop
                            times[When.READY, task] = writer_ready
                            times[When.GRANTED, task], times[When.LANDED, task] = grant, landed
                        task += 1
                    counter[target] = turn + 1
                    o += 1
                    w, before = waiter[target], -1
                    while w >= 0:
                        if wanted[w] == turn + 1:
                            if before < 0:
                                waiter[target] = next_waiter[w]
                            else:
                                next_waiter[before] = next_waiter[w]
                            ready[num_ready] = w
                            num_ready += 1
                            break
                        before, w = w, next_waiter[w]
                if waits:
                    break
                j += 1
                o = 0
            if costs is not None:
                tasks_done[s] = done
            if waits:
                break
            if costs is not None:
                t += epilogue
                totals[s, Total.BUSY] += epilogue
                if depth > 0 and store > 0:
                    if slot_free[s, done % depth] > t:
                        totals[s, Total.BLOCKED] += slot_free[s, done % depth] - t
                        t = slot_free[s, done % depth]
                    landed = max(t, writer_free[s, done % writers]) + store
                    slot_free[s, done % depth] = landed
                    writer_free[s, done % writers] = landed
                    totals[s, Total.END] = max(totals[s, Total.END], landed)
                    tasks_done[s] = done + 1
            p += 1
            j = -1
        if costs is not None:
            clock[s] = t
            totals[s, Total.END] = max(totals[s, Total.END], t)
        if not waits:
            standing[s, 0] = p
            finished += 1
            left[num_left] = seat[s]
            num_left += 1
    return FINISHED, resident, seat, standing, totals
