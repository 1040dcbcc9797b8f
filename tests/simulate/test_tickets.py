"""Packs in the models of time: tickets are drawn in order by the worker that is free first."""

from __future__ import annotations

import heapq
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dash_attn.order import POLICIES, applicable, looks_at_batch
from dash_attn.pack import Doc, Pack, assemble
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents
from dash_attn.program import Chain
from dash_attn.simulate import Machine, Model, Paper, Tickets, lower_bounds, simulate
from dash_attn.tiling import TileShape, tile
from dash_attn.tools.dag import dag
from dash_attn.verify import TooFewWorkers
from tests.pack.machine import ChainEnd, PackedTask, play, ticket_steps
from tests.simulate.test_simulate import machines, papers
from tests.strategies import examples, problems

SHAPE = TileShape(4, 8)


def pack_of(problem: Problem, policy: str = "auto", shape: TileShape = SHAPE) -> Pack:
    return Pack(problem, lambda _: shape, policy)


@st.composite
def packs(draw: st.DrawFn) -> Pack:
    problem = draw(problems(packed=True))
    shape = TileShape(draw(st.integers(2, 9)), draw(st.integers(2, 9)))
    orders = [applicable(tile(alone, shape)) for alone in problem.distinct.values()]
    names = [name for name in POLICIES if not looks_at_batch(name) and all(name in o for o in orders)]
    policy = draw(st.sampled_from(["auto", *names])) + draw(st.sampled_from(["", "@head"]))
    return pack_of(problem, policy, shape)


def lengths(*documents_of: int, mask: Mask = CAUSAL, heads: tuple[int, int] = (2, 2)) -> Problem:
    cu = [0, *np.cumsum(documents_of).tolist()]
    return Problem(1, *heads, cu[-1], cu[-1], mask=mask & documents(cu))


def by_hand(pack: Pack, workers: int, compute: int, reduce: int) -> tuple[float, list[int]]:
    """Makespan in the paper's model and the worker of each ticket, for orders that wait only for earlier tickets."""
    made, ends = assemble(pack.problem, pack.shape_of(pack.problem), pack.policy), Counter[object]()
    parts = -(-2 * made.sizes.shape.n // made.sizes.shape.m)
    free, owners = [(0, worker) for worker in range(workers)], []
    for ticket in range(made.tickets):
        clock, worker = heapq.heappop(free)
        owners.append(worker)
        for step in ticket_steps(made, ticket):
            if isinstance(step, ChainEnd):
                for part in range(parts if made.sizes.cut else 0):
                    key = ("dK dV", step.doc, step.kv_head, step.kv_tile, part)
                    clock = ends[key] = max(clock, ends[key]) + reduce
            else:
                key = ("dQ", step.doc, step.q_head, step.q_tile)
                clock = ends[key] = max(clock + compute, ends[key]) + reduce
        heapq.heappush(free, (clock, worker))
    return max(clock for clock, _ in free), owners


@examples(150)
@given(packs(), st.integers(1, 4), st.integers(0, 4), st.integers(1, 5))
def test_tickets_are_drawn_by_the_worker_that_is_free_first(pack: Pack, c: int, r: int, workers: int) -> None:
    tickets = Tickets.of(pack)
    assume(tickets.co_resident <= 1)
    result = simulate(tickets, workers, Paper(c, r))
    makespan, owners = by_hand(pack, workers, c, r)
    assert result.makespan == makespan
    assert result.outcome.seat.tolist() == owners


@examples(150)
@given(packs(), papers | machines, st.integers(0, 3))
def test_the_books_of_a_pack(pack: Pack, model: Model, more: int) -> None:
    tickets = Tickets.of(pack)
    workers = max(1, tickets.co_resident) + more
    result = simulate(tickets, workers, model)
    assert result.board.num_tasks == pack.num_tasks
    assert result.lower_bound == max(lower_bounds(tickets, workers, model).values()) <= result.makespan + 1e-9
    waiting = result.stall if isinstance(model, Paper) else result.blocked
    assert result.busy + waiting + result.bubble == pytest.approx(workers * result.makespan)
    assert 0 <= result.utilisation <= 1
    assert sorted(result.placement.chains.tolist()) == list(range(len(result.board.chains)))
    assert result.timeline.makespan <= result.makespan
    if isinstance(model, Paper):
        again = dag(tickets, result.placement, model)
        assert again.length() == pytest.approx(result.makespan), "the graph of the pack says the same"


@examples(100)
@given(packs())
def test_the_board_has_the_tasks_of_the_tables(pack: Pack) -> None:
    tickets = Tickets.of(pack)
    made = assemble(pack.problem, pack.shape_of(pack.problem), pack.policy)
    steps, board = tickets.board.expand(), tickets.board
    names = simulate(tickets, max(1, tickets.co_resident)).timeline.names
    begin = np.cumsum([0, *(s.len_q for s in pack.problem.sequences)])
    ours = Counter(
        (int(begin[names.batch[t]]), int(names.q_head[t]), int(steps.q[t]), int(names.kv_tile[t]), int(steps.turn[t]))
        for t in range(board.num_tasks)
    )
    theirs = Counter(
        (int(made.docs[task.doc, Doc.Q_ROW]), task.q_head, task.q_tile, task.kv_tile, task.turn)
        for task in play(made, made.co_resident)
        if isinstance(task, PackedTask)
    )
    assert ours == theirs
    per_sum = Counter(zip(steps.target.tolist(), steps.turn.tolist(), strict=True))
    assert set(per_sum.values()) <= {1}, "no two steps have one turn in one sum"
    highest = dict[int, int]()
    for target, turn in per_sum:
        highest[target] = max(turn, highest.get(target, 0))
    sizes = Counter(target for target, _ in per_sum)
    assert all(sizes[target] == turn + 1 for target, turn in highest.items())


def test_a_pack_by_hand() -> None:
    """A document of two kv tiles and one of one. The longer one has the first tickets, and its chains run in turn."""
    tickets = Tickets.of(pack_of(lengths(8, 16, mask=FULL, heads=(1, 1)), "fa3"))
    assert tickets.board.chains[:, Chain.BATCH].tolist() == [1, 1, 0]
    assert tickets.num_tickets == 3
    result = simulate(tickets, 2, Paper(3, 1))
    # Chain 0 takes 4 tasks until 16. Chain 1 waits 1 at its first task. Worker 0 then takes the short document.
    assert (result.makespan, result.stall) == (24, 1)
    assert result.outcome.seat.tolist() == [0, 1, 0]
    assert result.timeline.names.text(0) == "document 1 head 0 q 0 kv 0 turn 0"
    assert simulate(tickets, 3, Paper(3, 1)).makespan == 17


def test_documents_without_tokens_have_numbers_too() -> None:
    tickets = Tickets.of(pack_of(lengths(0, 8, 0, 0, 24, 0)))
    assert sorted(set(tickets.board.chains[:, Chain.BATCH].tolist())) == [1, 4]


def test_more_documents_than_one_fill_the_workers() -> None:
    one = simulate(Tickets.of(pack_of(lengths(64, heads=(1, 1)), "fa3")), 64, Paper())
    many = simulate(Tickets.of(pack_of(lengths(*[64] * 8, heads=(1, 1)), "fa3")), 64, Paper())
    assert many.utilisation > 2 * one.utilisation


def test_too_few_workers_are_named() -> None:
    tickets = Tickets.of(pack_of(lengths(64, 32, mask=FULL), "shift"))
    assert tickets.co_resident == 8
    with pytest.raises(TooFewWorkers, match="needs 8 co-resident workers, 7 are there"):
        simulate(tickets, 7)
    assert simulate(tickets, 8, Machine()).makespan > 0


def test_a_pack_without_work() -> None:
    result = simulate(Tickets.of(pack_of(lengths(0, 0))), 3)
    assert (result.makespan, result.lower_bound, result.utilisation, len(result.timeline)) == (0, 0, 0, 0)


def test_a_sequence_alone_takes_as_long_as_its_program() -> None:
    """One document is the problem itself: its chains in launch order, on workers that take the next one when free."""
    problem = Problem(1, 4, 4, 64, 64, mask=FULL)
    packed = Problem(1, 4, 4, 64, 64, mask=documents([0, 64]))
    for workers in (8, 16, 32):
        drawn = simulate(Tickets.of(pack_of(packed, "shift")), workers, Paper())
        assert (
            drawn.makespan == drawn.lower_bound == lower_bounds(_program(problem), workers, Paper())["work / workers"]
        )


@pytest.mark.parametrize("policy", ["spt", "spt@head", "shift"])
def test_panels_are_instances_like_documents(policy: str) -> None:
    """Each range of queries has its own sums of dK and dV, which a later pass folds."""
    problem = Problem(1, 4, 2, 64, 64, mask=FULL, panels=4)
    tickets = Tickets.of(pack_of(problem, policy))
    result = simulate(tickets, 16, Paper(2, 1))
    assert sorted(set(tickets.board.chains[:, Chain.BATCH].tolist())) == [0, 1, 2, 3]
    assert result.board.num_tasks == 4 * 16 * 8 and result.lower_bound <= result.makespan
    chains = 4 * 8 * (4 if "@head" in policy else 2)
    assert result.board.num_steps == result.board.num_tasks + chains * result.board.parts
    assert dag(tickets, result.placement, Paper(2, 1)).length() == result.makespan


def _program(problem: Problem):  # type: ignore[no-untyped-def]
    from dash_attn.launch import compose

    return compose(tile(problem, SHAPE), "shift")
