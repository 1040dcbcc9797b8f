"""When every task of a trace ran, in microseconds since the first worker began, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dash_attn.backends.sm90.config import HEAD, STAMPS
from dash_attn.backends.sm90.cta import DQ_SLOTS
from dash_attn.lazily import cached_property
from dash_attn.tools.trace.record import Trace, ends_of

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

IN_TIME = 1.5  # us: longer than any load takes
EARLY = 10.0  # tasks: a worker that waits longer for a slot began a window before the others were ready for it

# The common clock may tick only once a microsecond. A tie is a moment when both clocks were read. Ties closer than this
# (ns) would add noise.
TIE_APART = 100_000


@dataclass(frozen=True, eq=False)
class EventRows:
    """Which row of the events belongs to which task or chain.

    Tasks are in the order of the board, chains in placement order. The end of a chain has one row. The end of a cut
    chain has a row for each part of dV and dK: `end_row` is [chains, parts].
    """

    task_worker: Longs
    task_row: Longs
    chain_worker: Longs
    end_row: Longs

    @staticmethod
    def of(trace: Trace) -> EventRows:
        board, placement = trace.board, trace.placement
        lengths, ends = np.diff(board.task_first)[placement.chains], ends_of(board)
        worker = np.repeat(np.arange(len(placement.first) - 1), np.diff(placement.first))
        entry = np.cumsum(lengths + ends) - (lengths + ends)  # of a chain's first task, over all workers
        entry = entry - entry[placement.first[:-1]][worker]
        chain_worker, first = np.empty(len(board.chains), np.int64), np.empty(len(board.chains), np.int64)
        chain_worker[placement.chains], first[placement.chains] = worker, entry
        chain = np.repeat(np.arange(len(board.chains)), np.diff(board.task_first))
        row = 1 + first[chain] + np.arange(board.num_tasks) - board.task_first[chain]
        return EventRows(chain_worker[chain], row, worker, (1 + entry + lengths)[:, None] + np.arange(ends))

    @property
    def most(self) -> int:
        """The last row."""
        return int(max(self.task_row.max(initial=0), self.end_row.max(initial=0)))


@dataclass(frozen=True, eq=False)
class Measured:
    """Times in microseconds, by names of STAMPS.

    task   per task, in the order of the board
    begun  per chain, in placement order: the end of its last task
    end    per chain and part of its end, in placement order: [chains, parts]
    """

    trace: Trace
    sm: Longs  # of each worker
    start: Floats  # of each worker
    rows: EventRows
    task: dict[str, Floats]
    begun: Floats
    end: dict[str, Floats]
    split: bool  # each writer served one half of every tile

    @property
    def makespan(self) -> float:
        return max(float(times["landed"].max(initial=0.0)) for times in (self.task, self.end))

    @property
    def granted(self) -> Floats:
        """When a contribution was in its slot and its turn had come."""
        return np.maximum(self.task["turn"], self.task["staged"])

    @property
    def over(self) -> Floats:
        """When each chain's dK and dV were all staged, in placement order."""
        over: Floats = self.end["staged"][:, -1]
        return over

    def landed_before(self, worker: Longs, row: Longs, back: int) -> Floats:
        """When the slot of the entry `back` entries earlier was free again: its contribution, or its dV, had landed."""
        landed = np.full(self.trace.events.shape[:2], -np.inf)
        landed[self.rows.task_worker, self.rows.task_row] = self.task["landed"]
        landed[self.rows.chain_worker[:, None], self.rows.end_row] = self.end["landed"]
        before: Floats = landed[worker, np.maximum(row - back, 0)]  # row 0 is nobody's
        return before

    @cached_property
    def takes_sum(self) -> Bools:
        """Tasks that finish dQ: the last contributor of a dQ tile gets its slot with the sum of all others in it."""
        board = self.trace.board
        tasks = board.tasks()
        last = (tasks.turn > 0) & (tasks.turn == board.contributors[board.q_tile[tasks.chain] + tasks.q] - 1)
        takes: Bools = last & (self.config.get("finish") == "last")
        return takes

    @property
    def config(self) -> dict[str, Any]:
        """The config of the kernel, if the trace has it."""
        return dict(self.trace.facts.get("config", {}))

    @cached_property
    def blocked(self) -> Floats:
        """How long each task waited for a slot of dQ."""
        rows = self.rows
        return self._waited(self.task, (rows.task_worker, rows.task_row), ~self.takes_sum)

    @cached_property
    def end_blocked(self) -> Floats:
        """How long the end of each chain waited for slots: of its dV, or of the parts of dV and dK."""
        rows = self.rows
        at = rows.chain_worker[:, None], rows.end_row
        waited: Floats = self._waited(self.end, at, np.ones(rows.end_row.shape, bool)).sum(1)
        return waited

    def _waited(self, times: dict[str, Floats], at: tuple[Longs, Longs], plain: Bools) -> Floats:
        """The time from `computed` to `slot`, less the usual time there if the slot is free. That is the time of the
        stamps and barriers themselves."""
        took = times["slot"] - times["computed"]
        free = plain & (self.landed_before(*at, DQ_SLOTS) <= times["computed"])
        waited: Floats = np.where(free, 0.0, np.maximum(0.0, took - usual(took[free])))
        return waited

    @property
    def late(self) -> Floats:
        """How long the next task of each task's chain waited for Q. The arrival of Q has no stamp, only the request for
        Q. A pause counts if it is more than twice as long as the usual pause after a request in time."""
        pause = self.pitch() - (self.task["left"] - self.task["begun"])
        asked = np.append(self.task["loaded"][1:], np.inf)
        normal = usual(pause[(pause > 0) & (self.task["left"] - asked > IN_TIME)])
        late: Floats = np.where(pause > 2 * normal, pause - normal, 0.0)
        return late

    @property
    def first_tasks(self) -> Longs:
        """First task of each chain that has any, in placement order."""
        first, chains = self.trace.board.task_first, self.trace.placement.chains
        tasks: Longs = first[chains[first[chains + 1] > first[chains]]]
        return tasks

    def pitch(self) -> Floats:
        """The time from the begin of each task to the begin of the next task of its chain. The last task of a chain has
        the time to its own end."""
        begun = self.task["begun"]
        until = np.append(begun[1:], 0.0)
        first = self.trace.board.task_first
        last = first[1:][np.diff(first) > 0] - 1
        until[last] = self.task["left"][last]
        pitch: Floats = until - begun
        return pitch


def measured(trace: Trace) -> Measured:
    """Find the events of each task, and convert the cycles of all SMs to one time axis."""
    rows, events = EventRows.of(trace), trace.events
    if events.ndim != 3 or events.shape[2] != len(STAMPS) or len(events) != len(trace.placement.first) - 1:
        raise ValueError(f"events of shape {events.shape} do not belong to {len(trace.placement.first) - 1} workers")
    if events.shape[1] <= rows.most:
        raise ValueError(f"events of shape {events.shape} are too few for this placement")
    head = dict(zip(HEAD, events[:, 0, : len(HEAD)].T, strict=True))
    origin = int(head["time"].min())
    of_task, of_end = events[rows.task_worker, rows.task_row], events[rows.chain_worker[:, None], rows.end_row]
    stamp = {name: i for i, name in enumerate(STAMPS)}
    split = bool(of_task[:, stamp["landed 1"]].any())
    needed = [stamp[name] for name in STAMPS if split or not name.endswith(" 1")]
    tied, at_end = of_end[:, 0, stamp["loaded"]], [stamp["staged"], stamp["landed"]]
    if not of_task[:, needed].all() or not of_end[:, :, at_end].all() or not tied.all():
        raise ValueError("the trace is incomplete: some task left no stamp")

    tasks, ends = np.empty(of_task.shape), np.empty(of_end.shape)
    for worker in range(len(events)):
        mine, chains = rows.task_worker == worker, rows.chain_worker == worker
        cycle = np.append(head["cycle"][worker], of_end[chains, 0, stamp["begun"]])
        ns = np.append(head["time"][worker], tied[chains]) - origin
        tasks[mine] = on_common_clock(of_task[mine], cycle, ns)
        ends[chains] = on_common_clock(of_end[chains], cycle, ns)
    names = [name for name in STAMPS if not name.endswith(" 1")]
    by_task = {name: tasks[:, stamp[name]] for name in names}
    cut = ("turn",) if trace.board.parts else ()  # others end with plain stores
    by_end = {name: ends[:, :, stamp[name]] for name in ("computed", "slot", "staged", *cut, "landed")}
    if split:  # a turn is complete when both halves are
        for name in ("turn", "landed"):
            by_task[name] = np.maximum(by_task[name], tasks[:, stamp[f"{name} 1"]])
        for name in (*cut, "landed"):
            by_end[name] = np.maximum(by_end[name], ends[:, :, stamp[f"{name} 1"]])
    begun = ends[:, 0, stamp["begun"]]
    return Measured(trace, head["sm"], (head["time"] - origin) / 1e3, rows, by_task, begun, by_end, split)


def on_common_clock(cycles: Longs, cycle: Longs, ns: Longs) -> Floats:
    """Cycles of one SM as microseconds, from moments when both clocks were read."""
    keep, last = [0], len(ns) - 1
    for i in range(1, last):
        if ns[i] - ns[keep[-1]] >= TIE_APART and ns[last] - ns[i] >= TIE_APART:
            keep.append(i)
    keep.append(last)
    c, t = cycle[keep], ns[keep]
    at = np.clip(np.searchsorted(c, cycles, side="right") - 1, 0, len(c) - 2)
    slope = np.diff(t) / np.diff(c)
    us: Floats = (t[at] + (cycles - c[at]) * slope[at]) / 1e3
    return us


def usual(took: Floats) -> float:
    """The median, or 0 without values."""
    return float(np.median(took)) if len(took) else 0.0


WHAT = {
    "compute": "the products of the tasks",
    "slots": "waiting for a slot of dQ, that is for turns",
    "loads": "waiting for Q and dO between tasks",
    "gaps": "passing from stamp to stamp with nothing to wait for",
    "edges": "begin and end of chains: K, V, dK, dV",
    "bubble": "before the first and after the last chain of an SM",
    "turns": "(beside the tasks) contributions waiting their turn",
    "early": f"(part of slots) waits longer than {EARLY:.0f} tasks: ahead of the others",
}


@dataclass(frozen=True)
class Shares:
    """Where the time of the SMs went, in microseconds summed over the workers. All fields but `turns` and `early` add
    up to `whole`. WHAT explains the fields."""

    whole: float
    compute: float
    slots: float
    loads: float
    gaps: float
    edges: float
    bubble: float
    turns: float
    early: float

    def table(self) -> list[tuple[str, float, float]]:
        """(name, microseconds, share of the whole)."""
        return [(name, getattr(self, name), getattr(self, name) / self.whole) for name in WHAT]


def shares(run: Measured) -> Shares:
    task, end, task_first = run.task, run.end, run.trace.board.task_first
    has_tasks = np.diff(task_first)[run.trace.placement.chains] > 0
    blocked, late = run.blocked, run.late
    slots = float(blocked.sum() + run.end_blocked.sum())
    own = float((task["left"] - task["begun"] - (task["slot"] - task["computed"])).sum())
    passing = run.pitch() - (task["left"] - task["begun"]) + task["slot"] - task["computed"]
    end_passing = float((end["slot"] - end["computed"]).sum())
    gaps = float(passing.sum()) + end_passing - slots - float(late.sum())
    # The end of the chain before each chain. The first chain of a worker has the start of the worker.
    since = np.append(0.0, run.over[:-1])
    firsts = run.trace.placement.first[:-1]
    since[firsts] = run.start
    begin = run.begun.copy()
    begin[has_tasks] = task["begun"][run.first_tasks]
    before = float((begin - since).sum())
    after = float((run.over - run.begun).sum()) - end_passing
    last = run.over[run.trace.placement.first[1:] - 1]
    bubble = float((run.makespan - last).sum() + run.start.sum())
    # The tie of a chain is read a moment after its last task. That moment is part of the edge.
    task_end = np.zeros(len(run.begun))
    ends = task_first[run.trace.placement.chains + 1] - 1
    task_end[has_tasks] = run.begun[has_tasks] - task["left"][ends[has_tasks]]
    whole = len(run.sm) * run.makespan
    turns = float((run.granted - task["staged"]).sum())
    if "turn" in end:
        turns += float(np.maximum(0.0, end["turn"] - end["staged"]).sum())
    early = float(blocked[blocked > EARLY * usual(run.pitch())].sum())
    edges = before + after + float(task_end.sum())
    return Shares(whole, own, slots, float(late.sum()), gaps, edges, bubble, turns, early)
