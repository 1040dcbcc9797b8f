"""When every task of a trace really ran, in microseconds since the first worker began, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dash_attn.backends.sm90.config import HEAD, STAMPS
from dash_attn.backends.sm90.cta import DQ_SLOTS
from dash_attn.tools.trace.record import Trace

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

IN_TIME = 1.5  # us: longer than any load takes
EARLY = 10.0  # tasks: whoever waits longer for a slot began a window before the others were ready for it

# The common clock may tick once a microsecond only: ties of the two clocks closer than this (ns) would add noise.
TIE_APART = 100_000


@dataclass(frozen=True, eq=False)
class Rows:
    """Which row of the events belongs to what: per task, in the program's order, and per chain, in placement order."""

    task_worker: Longs
    task_row: Longs
    chain_worker: Longs
    chain_row: Longs

    @staticmethod
    def of(trace: Trace) -> Rows:
        program, placement = trace.program, trace.placement
        lengths = np.diff(program.task_first)[placement.chains]
        worker = np.repeat(np.arange(len(placement.first) - 1), np.diff(placement.first))
        entry = np.cumsum(lengths + 1) - (lengths + 1)  # of a chain's first task, over all workers
        entry = entry - entry[placement.first[:-1]][worker]
        chain_worker, first = np.empty(len(program.chains), np.int64), np.empty(len(program.chains), np.int64)
        chain_worker[placement.chains], first[placement.chains] = worker, entry
        chain = np.repeat(np.arange(len(program.chains)), np.diff(program.task_first))
        row = 1 + first[chain] + np.arange(program.num_tasks) - program.task_first[chain]
        return Rows(chain_worker[chain], row, worker, 1 + entry + lengths)


@dataclass(frozen=True, eq=False)
class Measured:
    """Times in microseconds. `task[name]` per task in the program's order, `chain[name]` per chain in placement order
    (names of STAMPS; of a chain "begun" is the end of its last task, "staged" its end)."""

    trace: Trace
    sm: Longs  # of each worker
    start: Floats  # of each worker
    rows: Rows
    task: dict[str, Floats]
    chain: dict[str, Floats]
    split: bool  # each writer served one half of every tile

    @property
    def makespan(self) -> float:
        return max(float(times["landed"].max(initial=0.0)) for times in (self.task, self.chain))

    @property
    def granted(self) -> Floats:
        """When a contribution was both there and in turn."""
        return np.maximum(self.task["turn"], self.task["staged"])

    def landed_before(self, worker: Longs, row: Longs, back: int) -> Floats:
        """When the contribution, or dV, that is `back` entries earlier had left its slot."""
        landed = np.full(self.trace.events.shape[:2], -np.inf)
        landed[self.rows.task_worker, self.rows.task_row] = self.task["landed"]
        landed[self.rows.chain_worker, self.rows.chain_row] = self.chain["landed"]
        before: Floats = landed[worker, np.maximum(row - back, 0)]  # row 0 is nobody's
        return before

    @cached_property
    def takes_sum(self) -> Bools:
        """Tasks whose slot comes with the sum of all others in it, where the last contributor finishes dQ."""
        tasks, program = self.trace.program.expand(), self.trace.program
        last = (tasks.turn > 0) & (tasks.turn == program.contributors[tasks.q] - 1)
        takes: Bools = last & (self.config.get("finish") == "last")
        return takes

    @property
    def config(self) -> dict[str, Any]:
        """Of the kernel, as far as the trace says."""
        return dict(self.trace.facts.get("config", {}))

    @cached_property
    def blocked(self) -> Floats:
        """How long each task waited for a slot of dQ."""
        rows = self.rows
        return self._waited(self.task, (rows.task_worker, rows.task_row), ~self.takes_sum)

    @cached_property
    def chain_blocked(self) -> Floats:
        """How long each chain waited for a slot for its dV."""
        rows = self.rows
        return self._waited(self.chain, (rows.chain_worker, rows.chain_row), np.ones(len(rows.chain_row), bool))

    def _waited(self, times: dict[str, Floats], at: tuple[Longs, Longs], plain: Bools) -> Floats:
        """From `computed` to `slot`, less what passes there when the slot has long been free: the time that stamps and
        barriers take themselves."""
        took = times["slot"] - times["computed"]
        free = plain & (self.landed_before(*at, DQ_SLOTS) <= times["computed"])
        waited: Floats = np.where(free, 0.0, np.maximum(0.0, took - usual(took[free])))
        return waited

    @property
    def late(self) -> Floats:
        """How long each task's successor in its chain waited for Q. When Q came is not stamped, only when it was asked
        for: a pause counts where it is twice as long as is usual with Q asked for in time."""
        pause = self.pitch() - (self.task["left"] - self.task["begun"])
        asked = np.append(self.task["loaded"][1:], np.inf)
        normal = usual(pause[(pause > 0) & (self.task["left"] - asked > IN_TIME)])
        late: Floats = np.where(pause > 2 * normal, pause - normal, 0.0)
        return late

    @property
    def first_tasks(self) -> Longs:
        """First task of each chain that has any, in placement order."""
        first = self.trace.program.task_first
        chains = self.trace.placement.chains
        tasks: Longs = first[chains[first[chains + 1] > first[chains]]]
        return tasks

    def pitch(self) -> Floats:
        """From each task's begin to that of the next one of its chain, or to the end of the last."""
        begun = self.task["begun"]
        until = np.append(begun[1:], 0.0)
        last = self.trace.program.task_first[1:] - 1
        last = last[np.diff(self.trace.program.task_first) > 0]
        until[last] = self.task["left"][last]
        pitch: Floats = until - begun
        return pitch


def measured(trace: Trace) -> Measured:
    """Put events to tasks, and cycles of each SM on one time axis."""
    rows, events = Rows.of(trace), trace.events
    if events.ndim != 3 or events.shape[2] != len(STAMPS) or len(events) != len(trace.placement.first) - 1:
        raise ValueError(f"events of shape {events.shape} do not belong to {len(trace.placement.first) - 1} workers")
    if events.shape[1] <= max(rows.task_row.max(initial=0), rows.chain_row.max(initial=0)):
        raise ValueError(f"events of shape {events.shape} are too few for this placement")
    head = dict(zip(HEAD, events[:, 0, : len(HEAD)].T, strict=True))
    origin = int(head["time"].min())
    of_task, of_chain = events[rows.task_worker, rows.task_row], events[rows.chain_worker, rows.chain_row]
    stamp = {name: i for i, name in enumerate(STAMPS)}
    split = bool(of_task[:, stamp["landed 1"]].any())
    needed = [stamp[name] for name in STAMPS if split or not name.endswith(" 1")]
    if not of_task[:, needed].all() or not of_chain[:, [stamp["loaded"], stamp["staged"], stamp["landed"]]].all():
        raise ValueError("the trace is incomplete: some task left no stamp")

    tasks, chains = np.empty(of_task.shape), np.empty(of_chain.shape)
    for worker in range(len(events)):
        mine, ends = rows.task_worker == worker, rows.chain_worker == worker
        cycle = np.append(head["cycle"][worker], of_chain[ends, stamp["begun"]])
        ns = np.append(head["time"][worker], of_chain[ends, stamp["loaded"]]) - origin
        tasks[mine] = on_common_clock(of_task[mine], cycle, ns)
        chains[ends] = on_common_clock(of_chain[ends], cycle, ns)
    names = [name for name in STAMPS if not name.endswith(" 1")]
    by_task = {name: tasks[:, stamp[name]] for name in names}
    by_chain = {name: chains[:, stamp[name]] for name in ("begun", "computed", "slot", "staged", "landed")}
    if split:  # a turn is complete when both halves are
        for name in ("turn", "landed"):
            by_task[name] = np.maximum(by_task[name], tasks[:, stamp[f"{name} 1"]])
        by_chain["landed"] = np.maximum(by_chain["landed"], chains[:, stamp["landed 1"]])
    return Measured(trace, head["sm"], (head["time"] - origin) / 1e3, rows, by_task, by_chain, split)


def on_common_clock(cycles: Longs, cycle: Longs, ns: Longs) -> Floats:
    """Cycles of one SM as microseconds, between and beyond moments when both clocks were read."""
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
    """The median; nothing where there is none."""
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
    """Where the SMs' time went, in microseconds summed over the workers; all but `turns` and `early` add up to the
    whole. WHAT says what is what."""

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
    task, chain = run.task, run.chain
    first = np.diff(run.trace.program.task_first)
    has_tasks = first[run.trace.placement.chains] > 0
    blocked, late = run.blocked, run.late
    slots = float(blocked.sum() + run.chain_blocked.sum())
    own = float((task["left"] - task["begun"] - (task["slot"] - task["computed"])).sum())
    passing = run.pitch() - (task["left"] - task["begun"]) + task["slot"] - task["computed"]
    chain_passing = chain["slot"] - chain["computed"]
    gaps = float(passing.sum() + chain_passing.sum()) - slots - float(late.sum())
    # A chain's first task begins this long behind the end of the chain before it.
    since = np.append(0.0, chain["staged"][:-1])
    firsts = run.trace.placement.first[:-1]
    since[firsts] = run.start
    begin = chain["begun"].copy()
    begin[has_tasks] = task["begun"][run.first_tasks]
    before = float((begin - since).sum())
    after = float((chain["staged"] - chain["begun"] - chain_passing).sum())
    last = chain["staged"][run.trace.placement.first[1:] - 1]
    bubble = float((run.makespan - last).sum() + run.start.sum())
    # The tie stamp of a chain comes a moment behind its last task: that moment is part of the edge.
    task_end = np.zeros(len(chain["begun"]))
    ends = run.trace.program.task_first[run.trace.placement.chains + 1] - 1
    task_end[has_tasks] = chain["begun"][has_tasks] - task["left"][ends[has_tasks]]
    whole = len(run.sm) * run.makespan
    turns = float((run.granted - task["staged"]).sum())
    early = float(blocked[blocked > EARLY * usual(run.pitch())].sum())
    edges = before + after + float(task_end.sum())
    return Shares(whole, own, slots, float(late.sum()), gaps, edges, bubble, turns, early)
