"""Placements: every bundle on one worker, in launch order, by the rule of the program."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.launch import compose, place
from dash_attn.launch.placement import NOMINAL
from dash_attn.problem import CAUSAL, Problem
from dash_attn.program import PlaceRule, Program, Sequences, play
from dash_attn.program.replay import FINISHED
from dash_attn.simulate import Machine
from dash_attn.tiling import TileShape, tile
from dash_attn.verify import verify
from tests.strategies import examples, programs


def owners(program: Program, placement: Sequences) -> list[int]:
    """The worker of each bundle; bundles are whole, and in launch order on each worker."""
    worker = np.empty(len(program.chains), np.int64)
    position = np.empty(len(program.chains), np.int64)
    worker[placement.chains] = np.repeat(np.arange(len(placement.first) - 1), np.diff(placement.first))
    position[placement.chains] = np.arange(len(program.chains))
    out, last = [], dict[int, int]()
    for a, b in pairwise(program.bundle_first.tolist()):
        bundle = program.launch[a:b]
        assert len(set(worker[bundle].tolist())) == 1
        assert np.array_equal(np.diff(position[bundle]), np.ones(b - a - 1))
        out.append(int(worker[bundle[0]]))
        assert position[bundle[0]] > last.get(out[-1], -1)
        last[out[-1]] = int(position[bundle[-1]])
    return out


@examples(200)
@given(programs(), st.integers(0, 6))
def test_placements_run_whole_bundles_in_launch_order(program: Program, more: int) -> None:
    verified = verify(program)
    workers = max(1, verified.co_resident) + more
    placement = place(program, workers, verified.rounds)
    assert len(placement.first) == workers + 1
    owners(program, placement)
    assert play(program, placement, None).status == FINISHED


def test_dealt_is_in_rotation_and_balanced_to_the_least_work() -> None:
    dealt = compose(tile(Problem(1, 1, 1, 5, 5, mask=CAUSAL), TileShape(1, 1)), "fa3")  # chains of 5, 4, 3, 2, 1 tasks
    assert dealt.place == "dealt" and owners(dealt, place(dealt, 2, None)) == [0, 1, 0, 1, 0]
    balanced = _ruled(dealt, "balanced")
    assert owners(balanced, place(balanced, 2, None)) == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("workers", [3, 8, 12, 132])
def test_faster_is_the_faster_of_both(workers: int) -> None:
    program = compose(tile(Problem(1, 8, 8, 2048, 2048, mask=CAUSAL), TileShape(64, 128)), "descending")
    assert program.place == "faster"
    best = play(program, place(program, workers, None), NOMINAL).makespan
    others = [
        play(other, place(other, workers, None), NOMINAL).makespan
        for other in (_ruled(program, "dealt"), _ruled(program, "balanced"))
    ]
    assert best == min(others)


def _ruled(program: Program, rule: PlaceRule) -> Program:
    return dataclasses.replace(program, place=rule)


def test_the_nominal_machine_is_a_machine_of_the_model() -> None:
    """It is no second model of time: only a Machine without edges, with a task as the unit."""
    assert Machine(1.0, 0.5, 0.5, prologue=0.0, epilogue=0.0, partial=0.0).costs() == NOMINAL
