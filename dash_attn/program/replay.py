"""Replay: run the tasks of a Program without computing, to see which task waits for which, and when.

Turns and visit orders are fixed. So every task runs at the same time, whichever worker the loop advances first. The
loop needs no event queue and passes over the tasks once. `simulate` uses the loop, and so does
`verify` where an order does not show by itself who waits for whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dash_attn.jit import compiled
from dash_attn.kept import kept
from dash_attn.program.board import Board, board_of
from dash_attn.program.program import Chain, Longs, Program, Run, Sequences

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


@kept()
def _unlike(tasks: int) -> Floats:
    """Numbers of mean 0 and standard deviation 1. RandomState gives the same ones in every numpy."""
    return np.random.RandomState(0).uniform(-(3**0.5), 3**0.5, tasks)


class Total(IntEnum):
    """Columns of `Replay.totals`: when a sequence ended, and how long it was busy, stalled and blocked."""

    END = 0
    BUSY = 1
    STALL = 2
    BLOCKED = 3


class Standing(IntEnum):
    """Columns of `Replay.standing`: where a sequence stands, as a position in its chains, a run, and a task of it."""

    POSITION = 0
    RUN = 1
    OFFSET = 2


NUM_TOTALS, NUM_STANDING = len(Total), len(Standing)  # compiled loops cannot take the length of an enum


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
    `standing` has a row per sequence (columns Standing). At the end of a cut chain the run is the one after its last,
    and the offset is the part. With costs, `totals` has a row per sequence (columns Total);
    with costs and `record`, `times` has a column per step of the board (rows When).
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
    program: Program | Board,
    sequences: Sequences,
    costs: Costs | None,
    *,
    resident: int | None = None,
    record: bool = False,
) -> Replay:
    """Advance all sequences until they are done or stuck. Without costs it only says whether they get done.

    With `resident`, sequences start in order: that many at first, and the next one when one ends. Without costs one
    more starts whenever nothing else can move. More residents never do harm, so the final count is the least that
    works. With costs there are `resident` workers, and the worker that is free first takes the next sequence.
    """
    board = board_of(program) if isinstance(program, Program) else program
    total = len(sequences.first) - 1
    drawn = costs is not None and resident is not None
    most = total if resident is None else min(resident, total)
    times = np.zeros((len(When), board.num_steps if record and costs else 0))
    status, needed, seat, standing, totals = _advance(
        board, sequences.first, sequences.chains, (most, drawn), _times(costs, board.num_tasks), times
    )
    return Replay(status, needed, seat, standing, totals, times)


def _times(costs: Costs | None, tasks: int) -> _Times | None:
    if costs is None:
        return None
    durations = {name: float(getattr(costs, name)) for name in _Times._fields[:-1] if name not in ("depth", "writers")}
    return _Times(**durations, depth=costs.depth, writers=costs.writers, paces=costs.paces(tasks))


@compiled
def _advance(board, seq_first, seq_chains, seats, costs, times):  # type: ignore[no-untyped-def]
    """The compiler leaves out what asks `costs is not None` where there are none."""
    chains, runs, task_first, part_first = board.chains, board.runs, board.task_first, board.part_first
    resident, drawn = seats
    total = len(seq_first) - 1
    counter = np.zeros(board.num_sums, np.int32)
    waiter = np.full(board.num_sums, -1, np.int32)  # the sequences that wait at a turnstile, as a linked list
    next_waiter = np.full(total, -1, np.int32)
    wanted = np.zeros(total, np.int32)
    standing = np.full((total, NUM_STANDING), -1, np.int64)
    totals = np.zeros((0 if costs is None else total, NUM_TOTALS))
    if costs is not None:
        compute, partial_cost, reduce, handoff, prologue, epilogue = costs[:6]
        depth, writers, store, fetch, stored, paces = costs[6:]
        record = times.shape[1] > 0
        released = np.zeros(board.num_sums)  # when the last contribution so far was handed over
        paused = np.zeros(total, np.int64)  # the step at which a sequence stands
        # Of each worker: a sequence that is drawn begins when its worker is free, and takes over the buffers.
        idle = np.full(resident, True)
        clock = np.zeros(resident)
        steps_done = np.zeros(resident, np.int64)
        slot_free = np.zeros((resident, max(depth, 1)))
        writer_free = np.zeros((resident, max(writers, 1)))
    ready = np.empty(total, np.int32)
    num_ready, admitted, finished = 0, 0, 0
    seat, left = np.empty(total, np.int64), np.empty(total, np.int64)  # a sequence that ends leaves its seat
    num_seats, num_left = 0, 0
    for s in range(total):
        standing[s, Standing.POSITION] = seq_first[s]
    while finished < total:
        if costs is not None and drawn and num_ready == 0 and admitted < total:
            # Who waits now waits for a sequence that has not begun. So the worker that is free first takes the next.
            w = -1
            for other in range(resident):
                if idle[other] and (w < 0 or clock[other] < clock[w]):
                    w = other
            if w < 0:
                return STUCK, resident, seat, standing, totals
            seat[admitted], idle[w] = w, False
            ready[num_ready] = admitted
            num_ready += 1
            admitted += 1
        while not drawn and admitted < total and admitted - finished < resident:
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
            if admitted == total or drawn:
                return STUCK, resident, seat, standing, totals
            resident += 1
            continue
        num_ready -= 1
        s = ready[num_ready]
        p, j, o = standing[s]
        if costs is not None:
            w = seat[s]
            t = clock[w]
        waits = False
        while p < seq_first[s + 1]:
            c = seq_chains[p]
            end = chains[c, Chain.FIRST_RUN] + chains[c, Chain.NUM_RUNS]
            cut = part_first[c] < part_first[c + 1]
            if costs is not None:
                step = task_first[c] if j < 0 else paused[s]
                done = steps_done[w]
            if j < 0:
                j, o = chains[c, Chain.FIRST_RUN], 0
                if costs is not None:
                    t += prologue
                    totals[s, Total.BUSY] += prologue
            while j < end or (j == end and cut):
                if j < end:
                    first = board.dq_sum[c] + runs[j, Run.HEAD] * board.num_q[c] + runs[j, Run.FIRST_Q]
                    q_step, count = int(runs[j, Run.STEP]), int(runs[j, Run.COUNT])
                    turn0, turn_step = int(runs[j, Run.TURN]), int(runs[j, Run.TURN_STEP])
                else:  # the parts of dK and dV
                    first, q_step, count, turn0, turn_step = board.kv_sum[c], 1, board.parts, board.kv_turn[c], 0
                if costs is not None:
                    if j == end:
                        step = part_first[c] + o
                    masking = partial_cost if j < end and runs[j, Run.PARTIAL] != 0 else 0.0
                while o < count:
                    target = first + q_step * o
                    turn = turn0 + turn_step * o
                    have = counter[target]
                    if have != turn:
                        standing[s, Standing.POSITION], standing[s, Standing.RUN] = p, j
                        standing[s, Standing.OFFSET] = o
                        if costs is not None:
                            paused[s] = step
                        if have > turn:
                            return PASSED, resident, seat, standing[s : s + 1], totals
                        next_waiter[s] = waiter[target]
                        waiter[target] = s
                        wanted[s] = turn
                        waits = True
                        break
                    if costs is not None:
                        begin = t
                        own = compute * paces[step] + masking if j < end else 0.0
                        stop = begin + own
                        writer_ready = stop
                        if depth == 0:
                            grant = max(stop, released[target])
                            landed = grant + reduce
                            totals[s, Total.BUSY] += own + reduce
                            totals[s, Total.STALL] += grant - stop
                            t = landed
                        else:
                            blocked = slot_free[w, done % depth] - stop
                            if fetch > 0 and turn > 0 and j < end:
                                tile = board.q_tile[c] + runs[j, Run.FIRST_Q] + q_step * o
                                if turn == board.contributors[tile] - 1:
                                    taken = max(slot_free[w, done % depth], writer_free[w, done % writers])
                                    blocked = max(taken, released[target]) + fetch - stop
                            if blocked > 0:
                                totals[s, Total.BLOCKED] += blocked
                                stop += blocked
                            writer_ready = max(stop, writer_free[w, done % writers])
                            grant = max(writer_ready, released[target])
                            landed = grant + (reduce * stored if turn == 0 else reduce)
                            totals[s, Total.BUSY] += own
                            totals[s, Total.STALL] += grant - writer_ready
                            slot_free[w, done % depth] = landed
                            writer_free[w, done % writers] = landed
                            t = stop
                        totals[s, Total.END] = max(totals[s, Total.END], landed)
                        released[target] = landed + handoff
                        done += 1
                        if record:
                            times[When.BEGIN, step], times[When.COMPUTED, step] = begin, stop
                            times[When.READY, step] = writer_ready
                            times[When.GRANTED, step], times[When.LANDED, step] = grant, landed
                        step += 1
                    counter[target] = turn + 1
                    o += 1
                    other, before = waiter[target], -1
                    while other >= 0:
                        if wanted[other] == turn + 1:
                            if before < 0:
                                waiter[target] = next_waiter[other]
                            else:
                                next_waiter[before] = next_waiter[other]
                            ready[num_ready] = other
                            num_ready += 1
                            break
                        before, other = other, next_waiter[other]
                if waits:
                    break
                j += 1
                o = 0
            if costs is not None:
                steps_done[w] = done
            if waits:
                break
            if costs is not None:
                t += epilogue
                totals[s, Total.BUSY] += epilogue
                if depth > 0 and store > 0 and not cut:
                    if slot_free[w, done % depth] > t:
                        totals[s, Total.BLOCKED] += slot_free[w, done % depth] - t
                        t = slot_free[w, done % depth]
                    landed = max(t, writer_free[w, done % writers]) + store
                    slot_free[w, done % depth] = landed
                    writer_free[w, done % writers] = landed
                    totals[s, Total.END] = max(totals[s, Total.END], landed)
                    steps_done[w] = done + 1
            p += 1
            j = -1
        if costs is not None:
            clock[w] = t
            totals[s, Total.END] = max(totals[s, Total.END], t)
        if not waits:
            standing[s, Standing.POSITION] = p
            finished += 1
            left[num_left] = seat[s]
            num_left += 1
            if costs is not None:
                idle[w] = True
    return FINISHED, resident, seat, standing, totals
