"""simulate(program, workers, model): when every task runs, and how far the makespan is from the lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dash_attn.program import Program, Replay, Sequences, play
from dash_attn.program.program import CHAIN_NAME
from dash_attn.program.replay import FINISHED, Floats, Total
from dash_attn.simulate.models import Model, Paper
from dash_attn.timeline import TaskNames, Timeline, events
from dash_attn.verify import verify


@dataclass(frozen=True, eq=False)
class Simulation:
    """Result of a simulation; times in the model's unit, sums over all workers.

    busy     computing (and, where the worker itself adds, adding), prologues and epilogues
    stall    contributions waiting at a turnstile
    blocked  workers waiting for a free dQ buffer (machine model only)
    bubble   workers with nothing to do: busy + bubble + (stall or blocked) = workers * makespan
    """

    program: Program
    placement: Sequences
    model: Model
    outcome: Replay

    @property
    def workers(self) -> int:
        return len(self.placement.first) - 1

    @property
    def makespan(self) -> float:
        return self.outcome.makespan

    @property
    def busy(self) -> float:
        return float(self.outcome.totals[:, Total.BUSY].sum())

    @property
    def stall(self) -> float:
        return float(self.outcome.totals[:, Total.STALL].sum())

    @property
    def blocked(self) -> float:
        return float(self.outcome.totals[:, Total.BLOCKED].sum())

    @property
    def bubble(self) -> float:
        waiting = self.stall if self.model.costs().depth == 0 else self.blocked
        # A difference of sums of many floats: zero comes out as rounding noise of either sign.
        idle = self.workers * self.makespan - self.busy - waiting
        return 0.0 if abs(idle) < 1e-9 * self.workers * self.makespan else idle

    @cached_property
    def lower_bound(self) -> float:
        return max(lower_bounds(self.program, self.workers, self.model).values())

    @property
    def gap(self) -> float:
        """Makespan over the lower bound, minus one."""
        return max(0.0, self.makespan / self.lower_bound - 1) if self.lower_bound else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        if not self.outcome.times.size and self.program.num_tasks:
            raise ValueError("this simulation kept no events: simulate(..., record=True)")
        return timeline_of(self)


def simulate(
    program: Program,
    workers: int,
    model: Model | None = None,
    *,
    placement: Sequences | None = None,
    record: bool = True,
) -> Simulation:
    """Run a program on `workers` workers under a model. A deadlock is a VerifyError, never a wrong number.

    Whoever has verified and placed the program gives the placement; else both happen here.
    """
    model = Paper() if model is None else model
    placed = verify(program).on(workers).placement if placement is None else placement
    outcome = play(program, placed, model.costs(), record=record)
    if outcome.status != FINISHED:
        verify(program).placed(placed)
        raise AssertionError("a program that cannot finish passed verification")
    return Simulation(program, placed, model, outcome)


def lower_bounds(program: Program, workers: int, model: Model) -> dict[str, float]:
    """Times below which no order and no placement can be: chains stay whole, a dQ tile takes one add at a time."""
    costs = model.costs()
    paces = costs.paces(program.num_tasks)
    until = np.concatenate([[0.0], np.cumsum(paces)])[program.task_first]
    edges = costs.prologue + costs.epilogue
    chains = costs.compute * np.diff(until) + costs.partial * program.partial_per_chain + edges
    if costs.depth == 0:
        chains += costs.reduce * np.diff(program.task_first)
    deepest = int(program.contributors.max(initial=0))
    adds = (deepest - 1 + costs.first) * costs.reduce + (deepest - 1) * costs.handoff
    reduction = costs.prologue + costs.compute * float(paces.min(initial=1.0)) + adds if deepest else 0.0
    return {
        "work / workers": float(chains.sum()) / workers,
        "longest chain": float(chains.max(initial=0.0)),
        "whole chains": _whole_chains(chains, workers),
        "longest reduction": reduction,
    }


def _whole_chains(chains: Floats, workers: int) -> float:
    """Of the k * workers + 1 longest chains, some worker runs k + 1: at least as long as the shortest k + 1 of them."""
    longest = np.sort(chains)[::-1]
    until = np.concatenate([[0.0], np.cumsum(longest)])
    last = np.arange(0, len(chains), workers)
    return float((until[last + 1] - until[last - last // workers]).max(initial=0.0))


def task_names(program: Program) -> TaskNames:
    """Names of all tasks, in task order."""
    tasks = program.expand()
    batch, kv_head, kv_tile = program.chains[tasks.chain, CHAIN_NAME].astype(np.int64).T
    return TaskNames(batch, kv_head * program.geometry.group + tasks.head, tasks.q, kv_tile, tasks.turn)


def timeline_of(simulation: Simulation) -> Timeline:
    """Events of a recorded simulation."""
    program, placement = simulation.program, simulation.placement
    worker_of_chain = np.empty(len(program.chains), np.int64)
    worker_of_chain[placement.chains] = np.repeat(np.arange(simulation.workers), np.diff(placement.first))
    worker = np.repeat(worker_of_chain, np.diff(program.task_first))
    return Timeline(
        f"{program.policy}, {program.mask}",
        simulation.model.unit,
        simulation.workers,
        task_names(program),
        *events(worker, simulation.outcome.times),
        overlapping=simulation.model.costs().depth > 0,
    )
