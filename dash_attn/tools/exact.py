"""The exact solver: the best order of a small problem in the paper's model of time, by constraint programming.

A task computes, waits for its turn, and adds. A chain holds its worker from its first task to its last. So the solver
only limits how many chains run at the same time. Its timetable then says which worker runs which chain. The simulator
and the lower bound that judge all other orders also judge the solver's.
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

from dash_attn.launch import compose
from dash_attn.order import POLICIES, Choice, Order, Rounds, Template, applicable
from dash_attn.order.rules import turns
from dash_attn.order.types import Ints
from dash_attn.program import Program, Queue, build
from dash_attn.program.replay import When
from dash_attn.simulate import Paper, Simulation, lower_bounds, simulate
from dash_attn.tiling import Tiling
from dash_attn.verify import Placed, TooFewWorkers, verify

MAX_TASKS = 400

Progress = Callable[[float, float], None]  # told the best makespan so far and the proved lower bound


@dataclass(frozen=True, eq=False)
class ExactResult:
    """The best order that the solver has, placed and simulated. No order at all is below `bound`."""

    placed: Placed
    simulation: Simulation
    bound: int

    @property
    def program(self) -> Program:
        return self.placed.program

    @property
    def makespan(self) -> int:
        return round(self.simulation.makespan)

    @property
    def optimal(self) -> bool:
        return self.makespan == self.bound


@dataclass(frozen=True, eq=False)
class Timetable:
    """When each task of a program starts to compute and when it starts to add, in whole units of time."""

    begin: Ints
    grant: Ints

    @staticmethod
    def of(simulation: Simulation) -> Timetable:
        """The model counts in whole units, so every time is a whole number."""
        times = simulation.outcome.times.round().astype(np.int64)
        return Timetable(times[When.BEGIN], times[When.GRANTED])


@dataclass(frozen=True)
class Budget:
    """How long to solve, and whom to tell on the way."""

    seconds: float
    progress: Progress | None


def solve(
    tiling: Tiling, workers: int, model: Paper, *, seconds: float = 60.0, progress: Progress | None = None
) -> ExactResult:
    """The order and placement of least makespan, or the best found in `seconds` with the bound proved by then.

    Of several optimal orders any may come back, not always the same.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    compute, reduce = model.compute, model.reduce
    if compute != int(compute) or reduce != int(reduce) or min(compute, reduce) < 0 or compute + reduce <= 0:
        raise ValueError(f"the exact solver counts in whole units: scale compute {compute} and reduce {reduce}")
    tasks = tiling.num_tiles * tiling.problem.heads_q * tiling.problem.batch
    if tasks > MAX_TASKS:
        raise ValueError(f"the exact solver takes at most {MAX_TASKS} tasks, this problem has {tasks}")
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ImportError("the exact solver needs OR-tools: pip install 'dash-attn[tools]'") from error

    start = _best_policy(tiling, workers, model)
    # Makespans are whole numbers; the bound is one up to rounding.
    bound = math.ceil(max(lower_bounds(start.program, workers, model).values()) - 1e-6)
    timetable = Timetable.of(start)
    if start.makespan > bound:
        timetable, bound = _solve(cp_model, start, bound, Budget(seconds, progress))
    # Tasks start as early as the order lets them: a timetable made in too little time may still hold slack.
    placed = verify(_program(tiling, start, timetable)).on(workers)
    return ExactResult(placed, simulate(placed.program, workers, model, placement=placed.placement), bound)


def _best_policy(tiling: Tiling, workers: int, model: Paper) -> Simulation:
    """The shortest that a named policy gives: where the solver starts from, and how far it has to look."""
    results = []
    for name in applicable(tiling):
        program = compose(tiling, Choice(name, workers if POLICIES[name].windowed else None))
        try:
            results.append(simulate(program, workers, model))
        except TooFewWorkers:
            continue  # fa3 is left in any case: it needs one worker
    return min(results, key=lambda result: result.makespan)


def _solve(cp: Any, start: Simulation, lower: int, budget: Budget) -> tuple[Timetable, int]:
    """The best timetable found for the tasks that `start` ran, at worst its own, and the bound proved by then."""
    board, compute, reduce = start.board, int(start.model.compute), int(start.model.reduce)
    hint = Timetable.of(start)
    horizon, each = round(start.makespan), compute + reduce
    model = cp.CpModel()
    begin = [model.new_int_var(0, horizon, "") for _ in hint.begin]
    grant = [model.new_int_var(0, horizon, "") for _ in hint.grant]
    makespan = model.new_int_var(lower, horizon, "")

    def interval(start: Any, end: Any, least: int) -> Any:
        return model.new_interval_var(start, model.new_int_var(least, horizon, ""), end, "")

    chains = []
    for first, last in pairwise(board.task_first.tolist()):
        if first == last:
            continue
        for t in range(first, last):
            model.add(grant[t] >= begin[t] + compute)
            model.add_hint(begin[t], int(hint.begin[t]))
            model.add_hint(grant[t], int(hint.grant[t]))
        model.add_no_overlap(interval(begin[t], grant[t] + reduce, each) for t in range(first, last))
        chain_begin, chain_end = model.new_int_var(0, horizon, ""), model.new_int_var(0, horizon, "")
        model.add_min_equality(chain_begin, begin[first:last])
        model.add_max_equality(chain_end, [grant[t] + reduce for t in range(first, last)])
        model.add(chain_end <= makespan)
        chains.append(interval(chain_begin, chain_end, (last - first) * each))
    model.add_cumulative(chains, [1] * len(chains), start.workers)
    adds = defaultdict(list)
    for t, target in enumerate(board.expand().target.tolist()):
        adds[target].append(model.new_fixed_size_interval_var(grant[t], reduce, ""))
    for together in adds.values():
        model.add_no_overlap(together)
    model.minimize(makespan)

    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = budget.seconds
    interrupt = signal.getsignal(signal.SIGINT)
    status = solver.solve(model, _report(cp, solver, budget.progress, horizon, lower))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)  # the solver leaves the system's handler, which ends the process
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return hint, lower
    timetable = Timetable(*(np.array([solver.value(x) for x in row], np.int64) for row in (begin, grant)))
    return timetable, max(lower, math.ceil(solver.best_objective_bound - 1e-6))


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


def _program(tiling: Tiling, start: Simulation, timetable: Timetable) -> Program:
    """The tasks of `start` ordered by a timetable: in chains by their begin, in dQ tiles by their grant."""
    tasks, first, n = start.board.expand(), start.board.task_first, tiling.num_kv
    by_time = np.lexsort((timetable.begin, tasks.chain))
    turn = turns(tasks.target, timetable.grant)[by_time]
    head, q = tasks.head[by_time], tasks.q[by_time]
    templates: list[Template] = []
    rounds: list[Rounds] = []
    for group in range(tiling.panels):
        mine = slice(int(first[group * n]), int(first[(group + 1) * n]))
        chain_first = first[group * n : (group + 1) * n + 1] - first[group * n]
        templates.append(Template(chain_first, head[mine], q[mine], turn[mine]))
        rounds.append([[(chain,) for chain in range(n)]])
    each = np.arange(tiling.panels)
    order = Order(tiling, Choice("exact"), tuple(templates), tuple(rounds), each, each)
    return build(order, _queue(start, timetable))


def _queue(start: Simulation, timetable: Timetable) -> Queue:
    """One bundle a worker: chains by their begin, each on the worker that the timetable leaves free first."""
    first, end = start.board.task_first.tolist(), timetable.grant + int(start.model.reduce)
    begin = [int(min(timetable.begin[a:b], default=0)) for a, b in pairwise(first)]
    free: list[tuple[int, int, list[int]]] = [(0, worker, []) for worker in range(start.workers)]
    for chain in sorted(range(len(begin)), key=begin.__getitem__):
        since, worker, bundle = free[0]
        bundle.append(chain)
        heapq.heapreplace(free, (int(end[first[chain] : first[chain + 1]].max(initial=since)), worker, bundle))
    bundles = [bundle for _, _, bundle in free if bundle]
    chains = np.array([chain for bundle in bundles for chain in bundle], np.int64)
    cuts = np.cumsum([0, *(len(bundle) for bundle in bundles)])
    return Queue(chains, cuts, "dealt")
