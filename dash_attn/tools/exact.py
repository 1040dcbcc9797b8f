"""The best order there is, under the paper's model, for problems small enough to ask: constraint programming.

A task computes, then waits for its turn, then adds; a chain holds its worker from its first task to its last.
So workers are a bound on how many chains run at once, and which chain runs where is settled afterwards.
"""

from __future__ import annotations

import heapq
import math
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dash_attn.order.orders import Tasks, turns
from dash_attn.order.policies import POLICIES, applicable, schedule
from dash_attn.order.types import Choice, Ints, Schedule, Template
from dash_attn.tiling import Tiling

MAX_TASKS = 400

Progress = Callable[[float, float], None]  # told the best makespan so far and the proved lower bound
Lists = list[list[int]]


@dataclass(frozen=True, eq=False)
class ExactResult:
    """`makespan` is that of `schedule` on as many workers as were asked for; no order at all is below `bound`."""

    schedule: Schedule
    makespan: int
    bound: int
    optimal: bool


@dataclass(frozen=True, eq=False)
class Work:
    """Every task of every group, chain by chain (chain ids as in a Schedule), and what a task costs."""

    tiling: Tiling
    first: Ints
    head: Ints
    q: Ints
    compute: int
    reduce: int

    @staticmethod
    def of(tiling: Tiling, compute: int, reduce: int) -> Work:
        one, groups = Tasks.of(tiling), tiling.problem.groups
        lengths = np.tile(tiling.spans[:, 2] * tiling.problem.group, groups)
        first = np.concatenate([[0], np.cumsum(lengths)])
        return Work(tiling, first, np.tile(one.head, groups), np.tile(one.q, groups), compute, reduce)

    @property
    def total(self) -> int:
        return len(self.q)

    @property
    def chains(self) -> Lists:
        """Tasks of each chain."""
        return [list(range(a, b)) for a, b in pairwise(self.first.tolist())]

    @property
    def target(self) -> Ints:
        """The dQ tile of each task, over all groups."""
        chain = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        group = chain // max(self.tiling.num_kv, 1)
        return (group * self.tiling.problem.group + self.head) * self.tiling.num_q + self.q

    def lower_bound(self, workers: int) -> int:
        """Work spread evenly, chains that cannot be cut, the longest reduction."""
        each = self.compute + self.reduce
        deepest = int(np.bincount(self.target).max(initial=0))
        longest = np.sort(np.diff(self.first))[::-1]
        # Of the k * workers + 1 longest chains, some worker gets k + 1.
        uncut = [int(longest[i - i // workers : i + 1].sum()) for i in range(0, len(longest), workers)]
        return max(
            -(-self.total // workers) * each,
            max(uncut, default=0) * each,
            deepest and self.compute + deepest * self.reduce,
        )


@dataclass(frozen=True, eq=False)
class Times:
    """When each task starts to compute and when it starts to add."""

    begin: Ints
    grant: Ints

    def makespan(self, work: Work) -> int:
        return int((self.grant + work.reduce).max(initial=0))


def exact(
    tiling: Tiling,
    workers: int,
    compute: int,
    reduce: int,
    *,
    seconds: float = 60.0,
    progress: Progress | None = None,
) -> ExactResult:
    """The order and placement of least makespan, or the best found in `seconds` with the bound proved by then.

    Of several optimal orders any may come back, not always the same.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if compute != int(compute) or reduce != int(reduce) or min(compute, reduce) < 0 or compute + reduce <= 0:
        raise ValueError(f"the exact solver counts in whole units: scale compute {compute} and reduce {reduce}")
    work = Work.of(tiling, int(compute), int(reduce))
    if work.total > MAX_TASKS:
        raise ValueError(f"the exact solver takes at most {MAX_TASKS} tasks, this problem has {work.total}")
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ImportError("the exact solver needs OR-tools: pip install 'dash-attn[search]'") from error

    best, bound = _best_policy(work, workers), work.lower_bound(workers)
    if best.makespan(work) > bound:
        best, bound = _solve(cp_model, work, workers, best, (bound, seconds, progress))
    found = _schedule(work, best, workers)
    # Tasks start as early as the order lets them: a solution that ran out of time may still hold slack.
    played = _play(work, found, _lines(found))
    assert played is not None, "an order read off a timetable runs"
    makespan = played.makespan(work)
    return ExactResult(found, makespan, bound, makespan == bound)


def _solve(
    cp: Any, work: Work, workers: int, hint: Times, limits: tuple[int, float, Progress | None]
) -> tuple[Times, int]:
    lower, seconds, progress = limits
    horizon = hint.makespan(work)
    model = cp.CpModel()
    begin = [model.new_int_var(0, horizon, "") for _ in range(work.total)]
    grant = [model.new_int_var(0, horizon, "") for _ in range(work.total)]
    makespan = model.new_int_var(lower, horizon, "")

    def interval(start: Any, end: Any, least: int) -> Any:
        return model.new_interval_var(start, model.new_int_var(least, horizon, ""), end, "")

    each = work.compute + work.reduce
    spans = []
    for chain in filter(None, work.chains):
        for t in chain:
            model.add(grant[t] >= begin[t] + work.compute)
            model.add_hint(begin[t], int(hint.begin[t]))
            model.add_hint(grant[t], int(hint.grant[t]))
        model.add_no_overlap(interval(begin[t], grant[t] + work.reduce, each) for t in chain)
        start, end = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
        model.add_min_equality(start, [begin[t] for t in chain])
        model.add_max_equality(end, [grant[t] + work.reduce for t in chain])
        model.add(end <= makespan)
        spans.append(interval(start, end, len(chain) * each))
    model.add_cumulative(spans, [1] * len(spans), workers)
    adds = defaultdict(list)
    for t, target in enumerate(work.target.tolist()):
        adds[target].append(model.new_fixed_size_interval_var(grant[t], work.reduce, ""))
    for together in adds.values():
        model.add_no_overlap(together)
    model.minimize(makespan)

    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    interrupt = signal.getsignal(signal.SIGINT)
    status = solver.solve(model, _report(cp, solver, progress, horizon, lower))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)  # the solver leaves the system's own, which ends the process
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return hint, lower
    times = Times(*(np.array([solver.value(x) for x in row], np.int64) for row in (begin, grant)))
    return times, max(lower, math.ceil(solver.best_objective_bound - 1e-6))


def _report(cp: Any, solver: Any, progress: Progress | None, best: float, bound: float) -> Any:
    """A solution callback that tells `progress` of every better makespan and every better bound."""
    if progress is None:
        return None
    state = [best, bound]

    def tell(at: int, value: float) -> None:
        state[at] = value
        progress(*state)

    class OnSolution(cp.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            tell(0, self.objective_value)

    solver.best_bound_callback = lambda value: tell(1, max(bound, value))
    return OnSolution()


def _best_policy(work: Work, workers: int) -> Times:
    """The shortest that a named policy gives: where the solver starts from, and how far it has to look."""
    found = []
    for name in applicable(work.tiling):
        candidate = schedule(work.tiling, Choice(name, workers if POLICIES[name].windowed else None))
        found.append(_play(work, candidate, _dealt(candidate, workers)))
    # There is always one: chains of fa3 wait only for chains that are launched before them.
    return min((times for times in found if times is not None), key=lambda times: times.makespan(work))


def _lines(order: Schedule) -> Lists:
    return [order.launch[a:b].tolist() for a, b in pairwise(order.bundle_first.tolist())]


def _dealt(order: Schedule, workers: int) -> Lists:
    """Bundles in launch order, each to the worker with the fewest tasks so far."""
    size = np.concatenate([np.diff(order.templates[t].first) for t in order.template_of])
    load: list[tuple[int, int, list[int]]] = [(0, worker, []) for worker in range(workers)]
    for bundle in _lines(order):
        tasks, worker, line = load[0]
        line += bundle
        heapq.heapreplace(load, (tasks + int(size[bundle].sum()), worker, line))
    return [line for _, _, line in load]


def _play(work: Work, order: Schedule, lines: Lists) -> Times | None:
    """Run chains on workers, every task as early as its turn allows; None if they wait for each other for ever."""
    visits, turn = _visits(work, order)
    queues = [[t for chain in line for t in visits[chain]] for line in lines]
    target, times = work.target, Times(np.zeros(work.total, np.int64), np.zeros(work.total, np.int64))
    at, clock = [0] * len(lines), [0] * len(lines)
    counter, released = defaultdict[int, int](int), defaultdict[int, int](int)
    moved = True
    while moved:
        moved = False
        for w, queue in enumerate(queues):
            while at[w] < len(queue) and counter[target[queue[at[w]]]] == turn[queue[at[w]]]:
                t = queue[at[w]]
                times.begin[t] = clock[w]
                times.grant[t] = max(clock[w] + work.compute, released[target[t]])
                clock[w] = released[target[t]] = int(times.grant[t]) + work.reduce
                counter[target[t]] += 1
                at[w] += 1
                moved = True
    return times if sum(at) == work.total else None


def _visits(work: Work, order: Schedule) -> tuple[Lists, Ints]:
    """Tasks of each chain in visit order, and the turn of each task."""
    visits, turn = [], np.empty(work.total, np.int64)
    for group, kind in enumerate(order.template_of.tolist()):
        template = order.templates[kind]
        for n, (a, b) in enumerate(pairwise(template.first.tolist())):
            begin = int(work.first[group * work.tiling.num_kv + n])
            by_name = np.lexsort((template.q[a:b], template.head[a:b]))
            turn[begin : begin + b - a] = template.turn[a:b][by_name]
            visits.append((begin + np.argsort(by_name)).tolist())
    return visits, turn


def _schedule(work: Work, times: Times, workers: int) -> Schedule:
    """Order by time: tasks in chains, contributions in dQ tiles, chains on whichever worker is free."""
    tiling, n = work.tiling, work.tiling.num_kv
    groups = tiling.problem.groups
    chain = np.repeat(np.arange(groups * n), np.diff(work.first))
    by_time = np.lexsort((times.begin, chain))
    turn = turns(work.target, times.grant)[by_time]
    head, q = work.head[by_time], work.q[by_time]
    templates = []
    for group in range(groups):
        first = work.first[group * n : (group + 1) * n + 1]
        mine = slice(int(first[0]), int(first[-1]))
        templates.append(Template(first - first[0], head[mine], q[mine], turn[mine]))

    begin = [min(times.begin[tasks].tolist(), default=0) for tasks in work.chains]
    free: list[tuple[int, int, list[int]]] = [(0, worker, []) for worker in range(workers)]
    for c in sorted(range(groups * n), key=lambda c: (begin[c], -len(work.chains[c]))):
        since, worker, line = free[0]
        line.append(c)
        until = max((int(times.grant[t]) + work.reduce for t in work.chains[c]), default=since)
        heapq.heapreplace(free, (until, worker, line))
    lines = [line for _, _, line in sorted(free, key=lambda entry: entry[1]) if line]
    launch = np.array([c for line in lines for c in line], np.int64)
    cut = np.concatenate([[0], np.cumsum([len(line) for line in lines])]).astype(np.int64)
    return Schedule(tiling, Choice("exact"), tuple(templates), np.arange(groups), launch, cut, "dealt")
