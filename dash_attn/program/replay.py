"""Run the tables in the abstract: who waits for whom, and when.

Turns and visit orders are fixed, so whatever order the sequences are advanced in, the same tasks get done and
each has the same times: no event queue, one pass, linear cost. Checking and simulating are the same loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dash_attn.jit import compiled
from dash_attn.program.program import Chain, Program, Run, Table

Floats = npt.NDArray[np.float64]

FINISHED, STUCK, PASSED = 0, 1, 2
TIMES = ("compute", "partial", "reduce", "handoff", "prologue", "epilogue", "store", "fetch", "first")


@dataclass(frozen=True)
class Costs:
    """Durations of a task's parts. depth 0: the worker itself adds its contribution and waits for it (the paper);
    depth b: `writers` warps do, from b buffers."""

    compute: float = 0.0
    partial: float = 0.0
    reduce: float = 0.0
    handoff: float = 0.0
    prologue: float = 0.0
    epilogue: float = 0.0
    depth: int = 0
    writers: int = 1
    store: float = 0.0  # not 0: a chain's end takes a buffer too, and a writer for so long
    fetch: float = 0.0  # not 0: the last contributor of a tile takes the sum in, this long after its turn has come
    first: float = 1.0  # the first contribution of a tile is stored, not added: this share of `reduce`
    jitter: float = 0.0  # tasks are not equally long: standard deviation, as a share of compute

    def paces(self, tasks: int) -> Floats:
        """How long each task computes, beside the mean."""
        return 1 + self.jitter * _unlike(tasks) if self.jitter else np.ones(tasks)


@lru_cache(maxsize=4)
def _unlike(tasks: int) -> Floats:
    """Mean 0, standard deviation 1. RandomState gives the same numbers for ever."""
    return np.random.RandomState(0).uniform(-(3**0.5), 3**0.5, tasks)


@dataclass(frozen=True, eq=False)
class Replay:
    """Outcome: `status`, the number of sequences that had to be resident, which of so many places each took, where
    each stands (chain, run, offset), and with costs per sequence (end, busy, stalled, blocked) and per task (compute
    begin, end, writer ready, turn come, landed) if recorded."""

    status: int
    resident: int
    seat: npt.NDArray[np.int64]
    standing: npt.NDArray[np.int64]
    totals: Floats
    times: Floats


@dataclass(frozen=True, eq=False)
class Sequences:
    """Lists of chains: sequence s runs chains[first[s]:first[s+1]]. Bundles and placements both are this."""

    first: Table
    chains: Table


def replay(
    program: Program, sequences: Sequences, costs: Costs | None, *, resident: int | None = None, record: bool = False
) -> Replay:
    """Advance all sequences until done or stuck; without costs only to see whether they get done.

    With `resident` sequences start in order, that many at first, the next when one ends; one more whenever nothing
    else can move. What is reached with few is also reached with more, so the final count is the least that works.
    """
    total = len(sequences.first) - 1
    times = np.zeros((5, program.num_tasks if record and costs else 0))
    numbers = costs and np.array([getattr(costs, name) for name in TIMES])
    status, needed, seat, standing, totals = _advance(
        (program.chains, program.runs, program.target_base, program.task_first, program.contributors),
        (sequences.first, sequences.chains),
        (program.geometry.num_targets, program.geometry.num_q, total if resident is None else min(resident, total)),
        costs and (numbers, costs.depth, costs.writers, costs.paces(program.num_tasks)),
        times,
    )
    return Replay(status, needed, seat, standing, totals, times)


@compiled
def _advance(tables, sequences, sizes, costs, times):  # type: ignore[no-untyped-def]
    """What asks `costs is not None` is left out by the compiler where there are none."""
    chains, runs, base, task_first, contributors = tables
    seq_first, seq_chains = sequences
    num_targets, num_q, resident = sizes
    total = len(seq_first) - 1
    counter = np.zeros(num_targets, np.int32)
    waiter = np.full(num_targets, -1, np.int32)  # sequences that wait at a turnstile, linked
    next_waiter = np.full(total, -1, np.int32)
    wanted = np.zeros(total, np.int32)
    standing = np.full((total, 3), -1, np.int64)  # position in seq_chains, run, offset
    totals = np.zeros((0 if costs is None else total, 4))
    if costs is not None:
        times_of, depth, writers, paces = costs
        compute, partial_cost, reduce, handoff, prologue, epilogue, store, fetch, stored = times_of
        record = times.shape[1] > 0
        released = np.zeros(num_targets)  # when the last contribution so far was handed over
        paused = np.zeros(total, np.int64)  # where a sequence stands, as a task number
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
                    totals[s, 1] += prologue
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
                            totals[s, 1] += own + reduce
                            totals[s, 2] += grant - stop
                            t = landed
                        else:
                            blocked = slot_free[s, done % depth] - stop
                            if fetch > 0 and 0 < turn == contributors[runs[j, Run.FIRST_Q] + step * o] - 1:
                                taken = max(slot_free[s, done % depth], writer_free[s, done % writers])
                                blocked = max(taken, released[target]) + fetch - stop
                            if blocked > 0:
                                totals[s, 3] += blocked
                                stop += blocked
                            writer_ready = max(stop, writer_free[s, done % writers])
                            grant = max(writer_ready, released[target])
                            landed = grant + (reduce * stored if turn == 0 else reduce)
                            totals[s, 1] += own
                            totals[s, 2] += grant - writer_ready
                            slot_free[s, done % depth] = landed
                            writer_free[s, done % writers] = landed
                            t = stop
                        totals[s, 0] = max(totals[s, 0], landed)
                        released[target] = landed + handoff
                        done += 1
                        if record:
                            times[0, task], times[1, task], times[2, task] = begin, stop, writer_ready
                            times[3, task], times[4, task] = grant, landed
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
                totals[s, 1] += epilogue
                if depth > 0 and store > 0:
                    if slot_free[s, done % depth] > t:
                        totals[s, 3] += slot_free[s, done % depth] - t
                        t = slot_free[s, done % depth]
                    landed = max(t, writer_free[s, done % writers]) + store
                    slot_free[s, done % depth] = landed
                    writer_free[s, done % writers] = landed
                    totals[s, 0] = max(totals[s, 0], landed)
                    tasks_done[s] = done + 1
            p += 1
            j = -1
        if costs is not None:
            clock[s] = t
            totals[s, 0] = max(totals[s, 0], t)
        if not waits:
            standing[s, 0] = p
            finished += 1
            left[num_left] = seat[s]
            num_left += 1
    return FINISHED, resident, seat, standing, totals
