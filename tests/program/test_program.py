"""Programs: tables that hold exactly the order they were built from, and cannot be changed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.launch import compose, enqueue
from dash_attn.order import Order, applicable, arrange
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.program import CHAIN, RUN, TABLES, TILE, Chain, Geometry, Program, Queue, Run, build
from dash_attn.tiling import TileShape, TileState, Tiling, tile
from dash_attn.verify import verify
from tests.strategies import arbitrary_orders, examples, programs, tilings

Visit = tuple[int, int, int, bool]


def visits(program: Program) -> list[list[Visit]]:
    """(head, q tile, turn, partial) of each chain, read run by run in plain Python."""
    chains = []
    for *_, first, count in program.chains.tolist():
        chain = []
        for head, q, step, length, turn, turn_step, partial in program.runs[first : first + count].tolist():
            chain += [(head, q + i * step, turn + i * turn_step, bool(partial)) for i in range(length)]
        chains.append(chain)
    return chains


def recut(program: Program, rng: np.random.Generator) -> Program:
    """The same order with every run cut at random, and no two chains sharing runs any more."""
    rows: list[list[int]] = []
    chains = program.chains.copy()
    for c, (*_, first, count) in enumerate(program.chains.tolist()):
        chains[c, Chain.FIRST_RUN] = len(rows)
        for head, q, step, length, turn, turn_step, partial in program.runs[first : first + count].tolist():
            at = 0
            while at < length:
                piece = int(rng.integers(1, length - at + 1))
                # One task takes no step, so any step will do.
                steps = (step, turn_step) if piece > 1 else tuple(rng.integers(-1, 2, 2).tolist())
                rows.append([head, q + at * step, steps[0], piece, turn + at * turn_step, steps[1], partial])
                at += piece
        chains[c, Chain.NUM_RUNS] = len(rows) - chains[c, Chain.FIRST_RUN]
    return dataclasses.replace(program, chains=chains, runs=np.array(rows, np.int32).reshape(-1, len(RUN)))


@examples(200)
@given(arbitrary_orders())
def test_tables_hold_the_order_and_the_queue(made: tuple[Order, Queue]) -> None:
    order, queue = made
    program, tiling = build(order, queue), order.tiling
    assert [getattr(program, name).shape[1] for name in TABLES[:3]] == [len(TILE), len(CHAIN), len(RUN)]
    expected = []
    for kind in order.template_of.tolist():
        template = order.templates[kind]
        for kv, (a, b) in enumerate(pairwise(template.first.tolist())):
            expected.append(
                [
                    (int(h), int(q), int(t), bool(tiling.state[kv, q] == TileState.PARTIAL))
                    for h, q, t in zip(template.head[a:b], template.q[a:b], template.turn[a:b], strict=True)
                ]
            )
    assert visits(program) == expected
    assert np.array_equal(program.launch, queue.chains) and np.array_equal(program.bundle_first, queue.bundle_first)


@examples(150)
@given(programs())
def test_expand_is_the_visits_in_table_order(program: Program) -> None:
    tasks, g = program.expand(), program.geometry
    rows = [(c, *visit) for c, chain in enumerate(visits(program)) for visit in chain]
    columns = (tasks.chain, tasks.head, tasks.q, tasks.turn, tasks.partial)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == rows
    assert program.num_tasks == len(rows)
    for (c, head, q, *_), target in zip(rows, tasks.target.tolist(), strict=True):
        batch, kv_head = program.chains[c, :2].tolist()
        assert target == ((batch * g.heads_kv + kv_head) * g.group + head) * g.num_q + q
    contributions = np.bincount(tasks.target, minlength=g.num_targets).reshape(-1, max(g.num_q, 1))
    assert not g.num_q or (contributions == program.contributors).all()


@examples(100)
@given(tilings())
def test_tile_table_is_the_tiling(tiling: Tiling) -> None:
    program = compose(tiling, "fa3")
    state = np.zeros_like(tiling.state)
    for kv, first, count, partial in program.tiles.tolist():
        assert count > 0 and not state[kv, first : first + count].any()
        state[kv, first : first + count] = TileState.PARTIAL if partial else TileState.FULL
    np.testing.assert_array_equal(state, tiling.state)


@examples(150)
@given(programs(), st.integers(0, 2**32 - 1))
def test_the_cut_into_runs_means_nothing(program: Program, seed: int) -> None:
    other = recut(program, np.random.default_rng(seed))
    assert visits(other) == visits(program)
    assert other.fingerprint == program.fingerprint
    assert verify(other).co_resident == verify(program).co_resident


@examples(100)
@given(programs(), st.data())
def test_fingerprint_sees_every_change_of_order(program: Program, data: st.DataObject) -> None:
    if not len(program.runs):
        return
    runs = program.runs.copy()
    runs[
        data.draw(st.integers(0, len(runs) - 1)),
        data.draw(st.sampled_from([Run.HEAD, Run.FIRST_Q, Run.TURN, Run.PARTIAL])),
    ] += 1
    assert dataclasses.replace(program, runs=runs).fingerprint != program.fingerprint
    geometry = dataclasses.replace(program.geometry, tile_m=program.geometry.tile_m + 1)
    assert dataclasses.replace(program, geometry=geometry).fingerprint != program.fingerprint


def test_programs_cannot_be_changed() -> None:
    program = compose(tile(Problem(1, 2, 2, 8, 8), TileShape(2, 2)), "shift")
    for name in TABLES:
        table = getattr(program, name)
        assert table.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            table[...] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.runs = program.runs  # type: ignore[misc]
    with pytest.raises(ValueError, match="table runs must be int32, got int64"):
        dataclasses.replace(program, runs=program.runs.astype(np.int64))


def test_who_made_the_tables_cannot_change_them() -> None:
    """Neither the caller's array, nor the array it is a view of, nor a flag set again reaches the program."""
    program = compose(tile(Problem(1, 2, 2, 8, 8), TileShape(2, 2)), "shift")
    base = np.concatenate([program.runs, program.runs])
    view = base[: len(program.runs)]
    view.flags.writeable = False
    other = dataclasses.replace(program, runs=view)
    fingerprint = other.fingerprint
    base[:] = 7
    np.testing.assert_array_equal(other.runs, program.runs)
    assert dataclasses.replace(other).fingerprint == fingerprint
    derived = (other.task_first, other.contributors, other.target_base)
    for table in (*(getattr(other, name) for name in TABLES), *derived):
        with pytest.raises(ValueError, match="WRITEABLE"):
            table.flags.writeable = True


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda program: pickle.loads(pickle.dumps(program))])
def test_copies_and_pickles_cannot_be_changed_either(again: Callable[[Program], Program]) -> None:
    program = compose(tile(Problem(1, 2, 2, 8, 8), TileShape(2, 2)), "shift")
    other = again(program)
    assert other.fingerprint == program.fingerprint and other.geometry == program.geometry
    for name in TABLES:
        np.testing.assert_array_equal(getattr(other, name), getattr(program, name))
        with pytest.raises(ValueError, match="WRITEABLE"):
            getattr(other, name).flags.writeable = True


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"tile_m": 0}, {"len_q": -1}, {"len_k": 2.0}, {"group": "1"}, {"len_q": 2**31}]
)
def test_geometries_that_no_problem_has(wrong: dict[str, Any]) -> None:
    geometry = Geometry(1, 1, 1, 8, 8, 2, 2)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(geometry, **wrong)
    with pytest.raises(ValueError, match="more than a program can number"):
        Geometry(2**15, 2**15, 1, 8, 8, 2, 2)


def test_numbers_of_numpy_are_numbers() -> None:
    plain = compose(tile(Problem(1, 2, 2, 8, 8), TileShape(2, 2)), "fa3")
    numpy = compose(tile(Problem(1, 2, 2, np.int64(8), np.int64(8)), TileShape(2, 2)), "fa3")  # type: ignore[arg-type]
    assert numpy.fingerprint == plain.fingerprint


def test_later_changes_of_the_source_do_not_reach_the_program() -> None:
    order = arrange(tile(Problem(1, 2, 2, 8, 8), TileShape(2, 2)), "shift")
    queue = enqueue(order)
    program = build(order, queue)
    launch, fingerprint = program.launch.copy(), program.fingerprint
    queue.chains[:] = queue.chains[::-1].copy()
    order.templates[0].turn[:] = 0
    np.testing.assert_array_equal(program.launch, launch)
    assert dataclasses.replace(program).fingerprint == fingerprint


def test_task_names() -> None:
    program = compose(tile(Problem(2, 4, 2, 4, 4, mask=CAUSAL), TileShape(1, 1)), "fa3")
    chain = next(i for i, row in enumerate(program.chains[:, :3].tolist()) if row == [1, 1, 2])
    run = int(program.chains[chain, Chain.FIRST_RUN])
    task = program.task(chain, run, 0)
    assert (task.batch, task.q_head, task.q_tile, task.kv_tile, task.turn) == (1, 2, 2, 2, 2)
    assert str(task) == "(batch 1, q head 2, q tile 2, kv tile 2, turn 2)"


# ---- size and speed ----------------------------------------------------------------------------------------

LONG = Problem(1, 32, 32, 128 * 1024, 128 * 1024, mask=CAUSAL)


@pytest.mark.parametrize("policy", ["fa3", "spt", "descending", "symmetric_shift", "diagonal", "search", "auto"])
def test_32_heads_of_128k_tokens(policy: str) -> None:
    """33.6 million tasks: under 20 MB; built and verified in under 5 s, when compiled."""
    verify(compose(tile(Problem(1, 1, 1, 256, 256, mask=CAUSAL), TileShape(64, 128)), policy))
    begin = time.process_time()
    program = compose(tile(LONG, TileShape(64, 128)), policy)
    verify(program)
    seconds = time.process_time() - begin
    assert program.num_tasks == 32 * (2048 * 1024 // 2 + 1024)
    assert program.nbytes < 20e6
    assert seconds < 5


def test_runs_are_long() -> None:
    """What heads share is stored once, and a chain is a few runs as long as turns advance evenly."""
    full, causal = dataclasses.replace(LONG, mask=FULL), LONG
    assert len(compose(tile(full, TileShape(128, 128)), "fa3").runs) == 1024
    assert len(compose(tile(full, TileShape(128, 128)), "shift:1024").runs) < 2 * 1024
    assert len(compose(tile(causal, TileShape(128, 128)), "spt").runs) < 2 * 1024


@pytest.mark.parametrize("lengths", [(0, 0), (0, 9), (9, 0)])
def test_problems_without_tasks(lengths: tuple[int, int]) -> None:
    for mask in (FULL, CAUSAL):
        tiling = tile(Problem(2, 4, 2, *lengths, mask=mask), TileShape(4, 4))
        for name in applicable(tiling):
            program = compose(tiling, name)
            assert program.num_tasks == 0
            assert verify(program).on(3).co_resident <= 1
            assert len(program.fingerprint) == 16
