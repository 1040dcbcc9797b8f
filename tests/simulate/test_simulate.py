"""Both models against a ticking clock, the books of a simulation, and its lower bounds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dash_attn.launch import compose
from dash_attn.order import applicable
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.program import Program, Sequences
from dash_attn.simulate import Machine, Model, Paper, lower_bounds, simulate
from dash_attn.tiling import TileShape, Tiling, tile
from dash_attn.verify import TooFewWorkers, VerifyError, verify
from tests.simulate import oracle
from tests.strategies import examples, programs

small = st.integers(0, 4)
papers = st.builds(Paper, small, small)
machines = st.builds(
    Machine, small, small, small, small, small, small, st.integers(1, 3), st.integers(1, 3), first=st.integers(0, 2)
)
uneven = st.builds(dataclasses.replace, machines, jitter=st.floats(0, 0.5))
models: st.SearchStrategy[Model] = papers | machines


@st.composite
def runs(draw: st.DrawFn, most: int = 120) -> tuple[Program, int]:
    """A program, and a number of workers that can run it."""
    program = draw(programs())
    assume(program.num_tasks <= most)
    return program, max(1, verify(program).co_resident) + draw(st.integers(0, 3))


@examples(250)
@given(runs(), papers | machines)
def test_simulation_is_what_a_clock_shows(run: tuple[Program, int], model: Model) -> None:
    program, workers = run
    result = simulate(program, workers, model)
    expected = oracle.run(program, verify(program).on(workers).placement, model.costs())
    assert result.makespan == expected.makespan
    assert (result.busy, result.stall, result.blocked) == (expected.busy, expected.stall, expected.blocked)
    times = [expected.times[t] for t in range(result.board.num_steps)]
    begin, computed, _, granted, landed = result.outcome.times
    np.testing.assert_array_equal(np.stack([begin, computed, granted, landed], 1), np.reshape(times, (-1, 4)))


@examples(200)
@given(runs(), models | uneven)
def test_no_program_beats_the_lower_bound(run: tuple[Program, int], model: Model) -> None:
    program, workers = run
    result = simulate(program, workers, model)
    bounds = lower_bounds(program, workers, model)
    assert result.lower_bound == max(bounds.values()) <= result.makespan + 1e-9
    assert result.gap >= -1e-12


@examples(200)
@given(runs(), models)
def test_the_books_balance(run: tuple[Program, int], model: Model) -> None:
    """Bubbles as holes between events: they, work and waiting make up the whole of workers x makespan."""
    program, workers = run
    result = simulate(program, workers, model)
    waiting = result.stall if isinstance(model, Paper) else result.blocked
    assert result.bubble >= 0
    assert result.busy + waiting + result.bubble == workers * result.makespan
    if isinstance(model, Paper):
        covered = sum(event.end - event.begin for event in result.timeline)
        assert covered == result.busy + result.stall
        adds = result.board.num_steps * model.reduce
        assert result.busy == program.num_tasks * model.compute + adds


@examples(100)
@given(runs(), papers)
def test_timeline_of_the_paper_model(run: tuple[Program, int], model: Paper) -> None:
    program, workers = run
    result = simulate(program, workers, model)
    timeline = result.timeline
    assert timeline.makespan == result.makespan and timeline.workers == workers and not timeline.overlapping
    assert timeline.total("stall") == result.stall
    assert timeline.total("compute") == program.num_tasks * model.compute
    assert timeline.total("reduce") == result.board.num_steps * model.reduce
    last = [0.0] * workers
    for event in sorted(timeline, key=lambda event: (event.begin, event.end)):
        assert event.begin >= last[event.worker], "one thing at a time on a worker"
        last[event.worker] = event.end
    # Contributions to one sum land in turn, one after the other.
    landed: dict[int, float] = {}
    names = timeline.names
    for event in sorted((e for e in timeline if e.role == "reduce"), key=lambda e: names.turn[e.task]):
        assert event.begin >= landed.get(int(names.target[event.task]), 0.0)
        landed[int(names.target[event.task])] = event.end


@examples(60)
@given(runs(), models, st.integers(2, 9))
def test_time_has_no_unit(run: tuple[Program, int], model: Model, factor: int) -> None:
    """All durations times `factor`: everything takes `factor` times as long."""
    program, workers = run
    durations = {
        f.name: getattr(model, f.name)
        for f in dataclasses.fields(model)
        if f.name not in ("depth", "writers", "first", "jitter")
    }
    scaled = dataclasses.replace(model, **{name: factor * value for name, value in durations.items()})
    assert simulate(program, workers, scaled).makespan == factor * simulate(program, workers, model).makespan


@examples(60)
@given(runs(), machines)
def test_more_buffers_never_hurt(run: tuple[Program, int], model: Machine) -> None:
    program, workers = run
    deeper = dataclasses.replace(model, depth=model.depth * 2)
    assert simulate(program, workers, deeper).makespan <= simulate(program, workers, model).makespan


@examples(60)
@given(runs(), small, small)
def test_waiting_for_every_add_is_the_slowest_machine(run: tuple[Program, int], compute: int, reduce: int) -> None:
    """The paper's worker adds by itself: a machine with a writer and nothing else to pay for is never slower."""
    program, workers = run
    machine = Machine(compute, reduce, 0, 0, 0, 0, 1, 1)
    assert simulate(program, workers, machine).makespan <= simulate(program, workers, Paper(compute, reduce)).makespan


# ---- by hand -----------------------------------------------------------------------------------------------


def two_by_two() -> Program:
    return compose(tile(Problem(1, 1, 1, 2, 2), TileShape(1, 1)), "fa3")


def test_the_two_by_two_example_of_the_paper() -> None:
    """Chain 1 waits for one reduction at its first task, and never again."""
    result = simulate(two_by_two(), 2, Paper(3, 1))
    assert (result.makespan, result.stall, result.bubble, result.lower_bound) == (9, 1, 1, 8)
    assert result.gap == 0.125
    stalls = [(event.worker, event.begin, event.end) for event in result.timeline if event.role == "stall"]
    assert stalls == [(1, 3, 4)]


def test_chains_are_not_cut() -> None:
    """Five chains of 2 tasks on two workers: one worker runs three of them, however much work there is on average."""
    program = compose(tile(Problem(1, 1, 1, 2, 5), TileShape(1, 1)), "fa3")
    bounds = lower_bounds(program, 2, Paper(3, 1))
    assert bounds["work / workers"] == 20 and bounds["longest chain"] == 8 and bounds["whole chains"] == 24
    triangle = compose(tile(Problem(1, 1, 1, 5, 5, mask=CAUSAL), TileShape(1, 1)), "fa3")
    assert lower_bounds(triangle, 2, Paper(1, 0))["whole chains"] == 7  # of 5, 4 and 3 tasks, one worker has two
    assert lower_bounds(triangle, 1, Paper(1, 0))["whole chains"] == 15


def test_the_machine_by_hand() -> None:
    """Worker 0 lands at 7 and 11, worker 1 gets each turn 2 later; with two buffers nobody is blocked."""
    model = Machine(compute=4, reduce=2, handoff=2, prologue=1, epilogue=3, partial=0, depth=2, writers=2)
    result = simulate(two_by_two(), 2, model)
    np.testing.assert_array_equal(result.outcome.times[-1], [7, 11, 11, 15])
    assert (result.makespan, result.busy, result.stall, result.blocked) == (15, 24, 8, 0)


def test_a_chain_leaves_through_a_buffer() -> None:
    """One worker, one buffer: its first chain ends at 9, when its second add has landed, and is out at 12."""
    model = Machine(2, 3, 0, 0, 0, 0, depth=1, writers=1, store=3)
    result = simulate(two_by_two(), 1, model)
    np.testing.assert_array_equal(result.outcome.times[-1], [5, 8, 14, 17])
    assert (result.makespan, result.blocked) == (20, 9)


def test_the_last_contributor_takes_the_sum_in() -> None:
    """Chain 1 is last everywhere: it has each tile 1 after the turn, which comes 2 after the add of chain 0."""
    model = Machine(4, 2, 2, 0, 0, 0, depth=2, writers=2, fetch=1)
    result = simulate(two_by_two(), 2, model)
    np.testing.assert_array_equal(result.outcome.times[1], [4, 8, 9, 13])
    np.testing.assert_array_equal(result.outcome.times[-1], [6, 10, 11, 15])
    assert result.blocked == 5


def test_tasks_that_are_not_equally_long() -> None:
    """As long on the whole, and each as long as the last time."""
    program = compose(tile(Problem(1, 8, 8, 512, 1), TileShape(1, 1)), "fa3")  # nobody waits
    model = Machine(2, 0, 0, 0, 0, 0, jitter=0.1)
    result = simulate(program, 8, model)
    begin, end = result.outcome.times[:2]
    assert np.mean(end - begin) == pytest.approx(2, rel=0.01) and np.std(end - begin) == pytest.approx(0.2, rel=0.02)
    assert result.busy == pytest.approx((end - begin).sum())
    assert result.makespan == simulate(program, 8, model).makespan == pytest.approx(result.lower_bound)
    assert model.costs().paces(2) == pytest.approx([1.01691, 1.07454], abs=1e-5), "for ever"
    with pytest.raises(ValueError, match="jitter must be between 0 and"):
        Machine(jitter=0.6)


def test_the_fitted_machine() -> None:
    assert Machine.h200(128).fetch == 0 < Machine.h200(128, last_finishes=True).fetch
    assert Machine.h200(64).writers == 1
    with pytest.raises(ValueError, match="head dim 80"):
        Machine.h200(80)


def test_without_events_there_is_no_timeline() -> None:
    result = simulate(two_by_two(), 2, record=False)
    assert result.makespan == simulate(two_by_two(), 2).makespan
    with pytest.raises(ValueError, match="record=True"):
        _ = result.timeline


def test_deadlock_is_an_error_not_a_number() -> None:
    program = compose(tile(Problem(1, 1, 1, 4, 4), TileShape(1, 1)), "shift")
    with pytest.raises(TooFewWorkers, match="this order needs 4 co-resident workers, 3 are there"):
        simulate(program, 3)
    stuck = Sequences(np.array([0, 2, 3, 4], np.int32), np.arange(4, dtype=np.int32))
    with pytest.raises(VerifyError, match="deadlock with 3 co-resident workers"):
        simulate(program, 3, placement=stuck)


def test_bad_arguments() -> None:
    with pytest.raises(TooFewWorkers, match="needs 1 co-resident workers, 0 are there"):
        simulate(two_by_two(), 0)
    with pytest.raises(ValueError, match="depth must be at least 1"):
        Machine(depth=0)
    with pytest.raises(ValueError, match="writers must be at least 1"):
        Machine(writers=0)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("workers", [1, 3, 7, 50])
def test_workers_that_divide_nothing(mask, workers: int) -> None:  # type: ignore[no-untyped-def]
    tiling: Tiling = tile(Problem(1, 10, 5, 9, 9, mask=mask), TileShape(1, 1))
    for name in applicable(tiling):
        program = compose(tiling, name)
        if verify(program).co_resident <= workers:
            for model in (Paper(), Machine()):
                result = simulate(program, workers, model)
                assert result.lower_bound <= result.makespan
                assert workers > 1 or result.stall == 0 or isinstance(model, Machine)


def test_cut_chains_add_up_dk_and_dv_in_turn() -> None:
    """Two q heads, one kv tile, one q tile. Head 1 computes beside head 0 and waits for its two parts."""
    program = compose(tile(Problem(1, 2, 1, 2, 2), TileShape(2, 2)), "fa3@head")
    result = simulate(program, 2, Paper(3, 1))
    assert result.board.parts == 2, "dK and dV"
    np.testing.assert_array_equal(result.outcome.times[-1], [4, 4, 5, 6, 6, 7])
    assert (result.makespan, result.busy, result.stall, result.lower_bound) == (7, 12, 1, 7)
    assert lower_bounds(program, 2, Paper(3, 1))["longest sum of dK and dV"] == 7
    ends = [event for event in result.timeline if event.task >= program.num_tasks]
    assert [(e.worker, e.role, e.begin, e.end) for e in ends if e.role == "stall"] == [(1, "stall", 4, 5)]
    assert {result.timeline.names.text(e.task) for e in ends} == {
        f"batch 0 head {head} dK dV kv 0 turn {head}" for head in (0, 1)
    }
    small = compose(tile(Problem(1, 2, 1, 2, 4), TileShape(2, 4)), "fa3@head")
    assert simulate(small, 1, Paper(3, 1)).makespan == 2 * (4 + 4), "tiles of twice the keys have twice the parts"
    whole = compose(tile(Problem(1, 2, 1, 2, 2), TileShape(2, 2)), "fa3")
    assert simulate(whole, 1, Paper(3, 1)).makespan == 8, "one chain has no sum of dK and dV"


# By head dim; not Machine.h200(), so that a new fit to an H200 moves no bound on an order.
LIKE_AN_H200 = {
    64: Machine(2.508, 1.661, 0.098, 0.071, 0.0, 0.012, writers=1, store=0.923),
    128: Machine(2.098, 1.396, 1.137, 0.1, 0.0, 0.018, store=1.0),
}


@pytest.mark.parametrize("workers", [132, 128, 124, 116, 114, 78])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 32, 32, 16384, 16384, 64, mask=CAUSAL),
        Problem(2, 16, 16, 8192, 8192, 128, mask=CAUSAL),
        Problem(1, 32, 8, 16384, 16384, 128, mask=CAUSAL),
    ],
    ids=["d64 16k", "d128 8k", "32/8 heads 16k"],
)
def test_level_fills_any_number_of_workers(problem: Problem, workers: int) -> None:
    """Pairs of equal length leave four of 132 workers waiting, and many of 124."""
    tiling = tile(problem, TileShape(64 if problem.dim == 128 else 128, 128))
    machine = LIKE_AN_H200[problem.dim]
    level, paired = (
        simulate(compose(tiling, name), workers, machine, record=False) for name in ("level", "symmetric_shift:32")
    )
    bound = lower_bounds(level.program, workers, machine)["work / workers"]
    grouped = problem.group > 1  # whose chains are kept in step, which costs some
    assert level.makespan < (1.02 if not grouped else 1.04 if workers > 100 else 1.11) * bound
    if workers != 128:
        assert level.makespan < paired.makespan - (0.005 if grouped else 0.015) * bound
