"""The exact solver: its answer runs as promised, is never beaten, and certifies the orders of the paper."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dash_attn.launch import compose
from dash_attn.order import POLICIES, Choice, Order, Template, applicable
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, window
from dash_attn.program import Chain, Program, Queue, build, play
from dash_attn.program.replay import FINISHED
from dash_attn.simulate import Paper, lower_bounds, simulate
from dash_attn.tiling import TileShape, Tiling, grid, tile
from dash_attn.tools.exact import MAX_TASKS, ExactResult, solve
from dash_attn.verify import VerifyError, verify
from tests.simulate import oracle
from tests.strategies import examples, grids

SECONDS = 20.0


def square(n: int, mask: Mask, heads: int = 1, group: int = 1) -> Tiling:
    return tile(Problem(1, heads * group, heads, n, n, mask=mask), TileShape(1, 1))


def makespan(tiling: Tiling, policy: str, workers: int, model: Paper) -> float:
    """Of a policy; infinite where it needs more workers."""
    try:
        return simulate(compose(tiling, policy), workers, model).makespan
    except VerifyError:
        return float("inf")


def check(tiling: Tiling, workers: int, compute: int, reduce: int) -> ExactResult:
    """Solve, and hold the answer against a ticking clock, the lower bound and every policy."""
    model = Paper(compute, reduce)
    result = solve(tiling, workers, model, seconds=SECONDS)
    placed = verify(result.program).on(workers)
    assert oracle.run(placed.program, placed.placement, model.costs()).makespan == result.makespan >= result.bound
    assert result.bound >= max(lower_bounds(result.program, workers, model).values()) - 1e-6
    for policy in applicable(tiling):
        assert makespan(tiling, policy, workers, model) >= result.bound
    return result


@examples(120)
@given(grids(4), st.integers(1, 5), st.integers(0, 4), st.integers(0, 3))
def test_small_problems_are_solved(tiling: Tiling, workers: int, compute: int, reduce: int) -> None:
    assume(np.count_nonzero(tiling.state) * tiling.problem.heads_q <= 24)  # of 32 tasks some take a minute
    assert check(tiling, workers, compute or 1, reduce).optimal


def every_program(tiling: Tiling) -> Iterator[Program]:
    """All visit orders x all turns x all bundles for two workers, of one group."""
    rows = [np.flatnonzero(row).tolist() for row in tiling.state]
    first = np.cumsum([0, *map(len, rows)])
    columns = [np.flatnonzero(column).tolist() for column in tiling.state.T]
    for visits in product(*map(permutations, rows)):
        q = np.array([x for row in visits for x in row], np.int64)
        for ranks in product(*(permutations(range(len(column))) for column in columns)):
            turn = [ranks[x][columns[x].index(kv)] for kv, row in enumerate(visits) for x in row]
            template = Template(first, np.zeros_like(q), q, np.array(turn, np.int64))
            for launch in permutations(range(tiling.num_kv)):
                for cut in range(1, tiling.num_kv + 1):
                    bundles = np.unique([0, cut, tiling.num_kv])
                    order = Order.of_one(tiling, Choice("all"), template, [[(kv,) for kv in launch]])
                    yield build(order, Queue(np.array(launch), bundles, "dealt"))


@pytest.mark.parametrize("state", [[[1, 1], [1, 1]], [[1, 1], [0, 1], [1, 1]], [[1, 1, 1], [0, 1, 1]]])
@pytest.mark.parametrize("cost", [(3, 1), (1, 2), (2, 0)])
def test_no_order_at_all_is_better(state: list[list[int]], cost: tuple[int, int]) -> None:
    tiling = grid(state, Problem(1, 1, 1, len(state[0]), len(state)), TileShape(1, 1))
    best = float("inf")
    for program in every_program(tiling):
        outcome = play(program, program.bundles, Paper(*cost).costs())
        if outcome.status == FINISHED:
            best = min(best, outcome.makespan)
    assert check(tiling, 2, *cost).makespan == best


@pytest.mark.parametrize("n", [2, 3, 4, 6])
@pytest.mark.parametrize("cost", [(4, 1), (1, 2)])
def test_shift_is_optimal(n: int, cost: tuple[int, int]) -> None:
    assert check(square(n, FULL, 2), n, *cost).makespan == 2 * n * sum(cost)
    assert makespan(square(n, FULL, 2), "shift", n, Paper(*cost)) == 2 * n * sum(cost)


@pytest.mark.parametrize("n", [2, 4, 6])
@pytest.mark.parametrize("cost", [(4, 1), (1, 2)])
def test_symmetric_shift_is_optimal(n: int, cost: tuple[int, int]) -> None:
    """One head on n/2 workers, two heads on n: both fill every worker to the end."""
    best = (n + 1) * sum(cost)
    assert check(square(n, CAUSAL), n // 2, *cost).makespan == best
    assert check(square(n, CAUSAL, 2), n, *cost).makespan == best
    assert makespan(square(n, CAUSAL, 2), "symmetric_shift", n, Paper(*cost)) == best


def test_solver_beats_every_policy_where_there_is_room() -> None:
    """Chains of 5, of 4 and 1, and of 3 and 2 tasks fill three workers; no policy does that without waiting."""
    tiling = square(5, CAUSAL)
    result = check(tiling, 3, 4, 1)
    assert result.optimal and result.makespan == 25
    assert min(makespan(tiling, policy, 3, Paper(4, 1)) for policy in applicable(tiling)) > 25


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(1, 1)], ids=str)
def test_query_groups_and_batches(mask: Mask) -> None:
    tiling = tile(Problem(2, 2, 1, 3, 3, mask=mask), TileShape(1, 1))
    assert check(tiling, 3, 2, 1).optimal


def test_chains_without_tasks_are_placed_too() -> None:
    tiling = tile(Problem(1, 1, 1, 2, 6, mask=window(0, 0)), TileShape(1, 1))
    assert (tiling.spans[:, 2] == 0).any()
    assert check(tiling, 2, 3, 1).makespan == 4
    nothing = tile(Problem(1, 1, 1, 0, 0), TileShape(1, 1))
    assert check(nothing, 2, 3, 1).makespan == 0


def test_progress_is_told() -> None:
    told: list[tuple[float, float]] = []
    result = solve(
        square(5, CAUSAL), 3, Paper(4, 1), seconds=SECONDS, progress=lambda best, bound: told.append((best, bound))
    )
    assert told and all(best >= result.makespan and bound <= result.makespan for best, bound in told)


def test_two_heads_of_an_odd_number_of_chains_are_no_puzzle_for_level() -> None:
    assert makespan(square(5, CAUSAL, 2), "level", 5, Paper(4, 1)) == check(square(5, CAUSAL, 2), 5, 4, 1).makespan


def test_an_interrupt_is_pythons_again() -> None:
    solve(square(5, CAUSAL), 3, Paper(4, 1), seconds=SECONDS)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)


def test_out_of_time_keeps_what_a_policy_gave() -> None:
    tiling = square(12, CAUSAL, 3)
    result = solve(tiling, 8, Paper(3, 2), seconds=1e-3)
    assert not result.optimal and result.bound < result.makespan
    widths = {name: ":8" if POLICIES[name].windowed else "" for name in applicable(tiling)}
    best = min(makespan(tiling, name + width, 8, Paper(3, 2)) for name, width in widths.items())
    assert result.makespan <= best


def test_errors_say_what_was_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_TASKS} tasks, this problem has 441"):
        solve(square(21, FULL), 4, Paper(4, 1))
    with pytest.raises(ValueError, match=r"whole units: scale compute 1 and reduce 0\.25"):
        solve(square(2, FULL), 2, Paper(1, 0.25))
    with pytest.raises(ValueError, match="whole units"):
        solve(square(2, FULL), 2, Paper(0, 0))
    with pytest.raises(ValueError, match="workers must be at least 1"):
        solve(square(2, FULL), 0, Paper(1, 1))
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ImportError, match=r"dash-attn\[tools\]"):
        solve(square(2, FULL), 2, Paper(1, 1))


def test_templates_may_differ_between_groups() -> None:
    program = solve(square(3, CAUSAL, 2), 3, Paper(4, 1), seconds=SECONDS).program
    assert (program.policy, program.place) == ("exact", "dealt")
    assert len(set(program.chains[:, Chain.FIRST_RUN].tolist())) == 6, "no two chains share their runs"
