"""simulate(program, workers, model): when every task runs, and how far the makespan is from the lower bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dash_attn.lazily import cached_property
from dash_attn.program import Board, Costs, Program, Replay, Sequences, board_of, play
from dash_attn.program.program import CHAIN_NAME
from dash_attn.program.replay import FINISHED, Floats, Total
from dash_attn.simulate.models import Model, Paper
from dash_attn.simulate.tickets import Tickets
from dash_attn.timeline import TaskNames, Timeline, events
from dash_attn.verify import require_workers, verify

Work = Program | Tickets


@dataclass(frozen=True, eq=False)
class Simulation:
    """The result of a simulation. Times are in the unit of the model, summed over all workers.

    busy     computing, prologues and epilogues. In the paper's model also adding
    stall    contributions waiting at a turnstile, of dQ or of dK and dV
    blocked  workers waiting for a free dQ buffer (machine model only)
    bubble   workers with nothing to do

    workers * makespan is busy + bubble + stall in the paper's model, and busy + bubble + blocked in the machine model.
    """

    program: Work
    placement: Sequences
    model: Model
    outcome: Replay

    @cached_property
    def board(self) -> Board:
        return board_for(self.program)

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

    @property
    def utilisation(self) -> float:
        """The share of the workers' time in which they are busy."""
        return self.busy / (self.workers * self.makespan) if self.makespan else 0.0

    @cached_property
    def lower_bound(self) -> float:
        return max(lower_bounds(self.program, self.workers, self.model).values())

    @property
    def gap(self) -> float:
        """Makespan over the lower bound, minus one."""
        return max(0.0, self.makespan / self.lower_bound - 1) if self.lower_bound else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        if not self.outcome.times.size and self.board.num_tasks:
            raise ValueError("this simulation kept no events: simulate(..., record=True)")
        return timeline_of(self)


def board_for(work: Work) -> Board:
    """The chains of a program or of a pack, and their sums."""
    return work.board if isinstance(work, Tickets) else board_of(work)


def simulate(
    program: Work,
    workers: int,
    model: Model | None = None,
    *,
    placement: Sequences | None = None,
    record: bool = True,
) -> Simulation:
    """Run a program on `workers` workers in a model. A deadlock is a VerifyError, never a wrong number.

    Without a `placement`, this function verifies the program and places it. In a pack the worker that is free first
    draws the next ticket. A trace of a pack gives the placement that its workers have drawn.
    """
    model = Paper() if model is None else model
    if isinstance(program, Tickets):
        if placement is None:
            return _draw(program, workers, model, record)
        outcome = play(program.board, placement, model.costs(), record=record)
        if outcome.status != FINISHED:
            raise ValueError("with these chains the workers wait for each other for ever: this is no placement")
        return Simulation(program, placement, model, outcome)
    placed = verify(program).on(workers).placement if placement is None else placement
    outcome = play(program, placed, model.costs(), record=record)
    if outcome.status != FINISHED:
        verify(program).placed(placed)
        raise AssertionError("a program that cannot finish passed verification")
    return Simulation(program, placed, model, outcome)


def _draw(tickets: Tickets, workers: int, model: Model, record: bool) -> Simulation:
    require_workers(tickets.policy, tickets.co_resident, workers)
    outcome = play(tickets.board, tickets.bundles, model.costs(), resident=workers, record=record)
    if outcome.status != FINISHED:
        raise AssertionError("enough workers draw tickets, and all of them wait for ever")
    chains_of = np.diff(tickets.bundles.first)
    worker = np.repeat(outcome.seat, chains_of)
    first = np.concatenate([[0], np.cumsum(np.bincount(worker, minlength=workers))])
    chains = tickets.bundles.chains[np.argsort(worker, kind="stable")]
    return Simulation(tickets, Sequences(first.astype(np.int32), chains), model, outcome)


def lower_bounds(program: Work, workers: int, model: Model) -> dict[str, float]:
    """No order and no placement is faster than these times: chains stay whole, and a sum takes one add at a time."""
    costs, board = model.costs(), board_for(program)
    paces = costs.paces(board.num_tasks)
    until = np.concatenate([[0.0], np.cumsum(paces)])[board.task_first]
    chains = costs.prologue + costs.compute * np.diff(until) + costs.partial * board.partial_per_chain
    if costs.depth == 0:
        chains += costs.reduce * np.diff(board.task_first)
    whole = chains + costs.epilogue
    if costs.depth == 0:
        whole += costs.reduce * np.diff(board.part_first)
    deepest = int(board.contributors.max(initial=0))
    first_add = costs.prologue + costs.compute * float(paces.min(initial=1.0))
    return {
        "work / workers": float(whole.sum()) / workers,
        "longest chain": float(whole.max(initial=0.0)),
        "whole chains": _whole_chains(whole, workers),
        "longest reduction": first_add + _adds(deepest, costs) if deepest else 0.0,
        **({"longest sum of dK and dV": _longest_kv_sum(board, chains, costs)} if board.parts else {}),
    }


def _adds(contributors: int, costs: Costs) -> float:
    """The time of all adds to one sum, one after the other."""
    return (contributors - 1 + costs.first) * costs.reduce + (contributors - 1) * costs.handoff


def _longest_kv_sum(board: Board, until_end: Floats, costs: Costs) -> float:
    """The q heads of a group add to a part of dK or dV in turn. The first q head adds when its tasks are done.

    If the worker itself adds, the last q head then adds its other parts.
    """
    cut = np.diff(board.part_first) > 0
    if not cut.any():
        return 0.0
    sums, of = np.unique(board.kv_sum[cut], return_inverse=True)
    earliest, last_turn = np.full(len(sums), np.inf), np.zeros(len(sums), np.int64)
    np.minimum.at(earliest, of, until_end[cut])
    np.maximum.at(last_turn, of, board.kv_turn[cut])
    rest = (board.parts - 1) * costs.reduce if costs.depth == 0 else 0.0
    ends = zip(earliest.tolist(), last_turn.tolist(), strict=True)
    return max(float(begin) + _adds(turn + 1, costs) + rest for begin, turn in ends)


def _whole_chains(chains: Floats, workers: int) -> float:
    """Of the k * workers + 1 longest chains, some worker runs k + 1: at least as long as the k + 1 shortest of them."""
    longest = np.sort(chains)[::-1]
    until = np.concatenate([[0.0], np.cumsum(longest)])
    last = np.arange(0, len(chains), workers)
    return float((until[last + 1] - until[last - last // workers]).max(initial=0.0))


def task_names(program: Work) -> TaskNames:
    """Names of all tasks, and then of the parts of cut chains."""
    board = board_for(program)
    tasks = board.expand()
    sequence, _, kv_tile = board.chains[tasks.chain, CHAIN_NAME].astype(np.int64).T
    word = "document" if isinstance(program, Tickets) else "batch"
    q_head = board.q_head[tasks.chain] + tasks.head
    return TaskNames(sequence, q_head, tasks.q, kv_tile, tasks.turn, tasks.target, word)


def _orders(policies: str) -> str:
    """The name of a policy, or the number of the policies of a pack."""
    count = len(policies.split(", "))
    return policies if count == 1 else f"{count} orders"


def timeline_of(simulation: Simulation) -> Timeline:
    """Events of a recorded simulation."""
    program, board, placement = simulation.program, simulation.board, simulation.placement
    worker_of_chain = np.empty(len(board.chains), np.int64)
    worker_of_chain[placement.chains] = np.repeat(np.arange(simulation.workers), np.diff(placement.first))
    return Timeline(
        f"{_orders(program.policy)}, {program.mask}",
        simulation.model.unit,
        simulation.workers,
        task_names(program),
        *events(worker_of_chain[board.expand().chain], simulation.outcome.times, board.num_tasks),
        overlapping=simulation.model.costs().depth > 0,
    )
