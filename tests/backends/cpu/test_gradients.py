"""Gradients against float64: as good as torch's own, for every mask, shape and dtype."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.order import POLICIES, applicable
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, intervals, intervals_by_row, tiles, window
from dash_attn.tiling import TileShape, tile
from dash_attn.tools.bench.operands import exact
from tests.backends.cpu.reference import DTYPES, by_torch, difference, error, operands, ordered, run
from tests.strategies import examples, problems, shapes, tile_masks

# The root of the mean square error may be FACTOR times torch's. It may be larger by ROUNDINGS roundings of a number of
# size 1 or of the largest gradient: torch's error can be 0 by chance when there are few numbers.
FACTOR, ROUNDINGS, FEW = 1.5, 0.25, 4.0

RNG = np.random.default_rng(0)
MASKS: list[tuple[Mask, int, int]] = [
    (FULL, 200, 200),
    (FULL, 130, 210),
    (CAUSAL, 200, 200),
    (CAUSAL, 97, 211),  # every query sees keys from before the first query
    (CAUSAL, 211, 97),  # the first queries see nothing
    (window(40, 0), 200, 200),
    (window(17, 30), 180, 230),
    (window(0, 0), 150, 150),
    (documents([0, 50, 50, 131, 200]), 200, 200),
    (documents([0, 50, 50, 131, 200], causal=True), 200, 200),
    (documents([0, 50, 60, 131, 200], [0, 0, 80, 90, 170], causal=True), 200, 170),
    (documents([0, 70, 200]) & window(20, 5), 200, 200),
    (tiles(RNG.random((4, 4)) < 0.5, 64, 64), 200, 200),
    (tiles(RNG.random((4, 3)) < 0.6, 64, 64) & CAUSAL, 200, 170),
    (tiles(np.zeros((4, 4)), 64, 64), 200, 200),
    (intervals_by_row(lambda row: (0, max(row + 1, 70)), 200), 200, 200),  # prefix
    (intervals_by_row(lambda row: (0, (row // 48 + 1) * 48), 200), 200, 200),  # causal from block to block
    (intervals_by_row(lambda row: (row // 64 * 64, row + 1), 200), 200, 170),  # chunks
    (intervals(RNG.integers(0, 150, 200), RNG.integers(20, 170, 200)), 200, 170),  # in any order, some empty
    (
        intervals(RNG.integers(0, 99, 200), RNG.integers(9, 170, 200)) & tiles(RNG.random((4, 3)) < 0.6, 64, 64),
        200,
        170,
    ),
    (intervals([0] * 60, [0] * 60), 60, 60),
    (FULL, 0, 60),
    (FULL, 60, 0),
    (CAUSAL, 1, 1),
    (CAUSAL, 1, 100),
]


def check(problem: Problem, shape: TileShape, policy: str = "auto", roundings: float = ROUNDINGS) -> None:
    given_ = operands(problem)
    got = run(ordered(problem, shape, policy), given_, threads=2)
    expected, theirs = exact(problem, *given_[:4]).gradients, by_torch(problem, given_)
    unit = torch.finfo(DTYPES[problem.dtype]).eps
    for name, mine, their, want in zip(("dq", "dk", "dv"), got, theirs, expected, strict=True):
        assert mine.dtype == DTYPES[problem.dtype]
        size = max(1.0, float(want.abs().max())) if want.numel() else 0.0
        assert error(mine, want) <= FACTOR * error(their, want) + roundings * unit * size, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mask", "len_q", "len_k"), MASKS, ids=lambda value: str(value))
def test_masks(mask: Mask, len_q: int, len_k: int, dtype: str) -> None:
    few = FEW if len_q * len_k < 1000 else ROUNDINGS
    check(Problem(2, 2, 2, len_q, len_k, 32, dtype, None, mask), TileShape(32, 64), roundings=few)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 2), (6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(30, 0)], ids=str)
def test_grouped_heads(mask: Mask, heads_q: int, heads_kv: int) -> None:
    check(Problem(2, heads_q, heads_kv, 120, 140, 16, "float32", None, mask), TileShape(32, 48))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(64, 0)], ids=str)
def test_policies(mask: Mask, policy: str) -> None:
    problem, shape = Problem(1, 4, 2, 200, 200, 16, "float32", None, mask), TileShape(32, 32)
    if policy in applicable(tile(problem, shape)):
        check(problem, shape, policy)
        check(problem, shape, f"{policy}@head")


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_scale(scale: float, mask: Mask) -> None:
    check(Problem(1, 2, 2, 100, 100, 16, "float32", scale, mask), TileShape(32, 32), roundings=1.0)


def test_large_scores() -> None:
    """Masked scores far above the row's lse must not overflow into the sums."""
    problem = Problem(1, 1, 1, 64, 64, 16, "float32", 500.0, CAUSAL)
    given_ = operands(problem)
    got = run(ordered(problem, TileShape(32, 32)), given_)
    assert all(x.isfinite().all() for x in got)


@given(problems(packed=True), shapes, st.sampled_from(sorted(DTYPES)), st.data())
@examples(40)
def test_any_pack(problem: Problem, shape: TileShape, dtype: str, data: st.DataObject) -> None:
    problem = replace(problem, dim=8, dtype=dtype)
    policy = data.draw(st.sampled_from(["auto", "fa3", "spt", "search", "descending@head"]))
    check(problem, shape, policy, FEW)
    given_, planned = operands(problem), ordered(problem, shape, policy)
    assert not difference(run(planned, given_, threads=1), run(planned, given_, workers=3, threads=3, jitter=1e-4))


@given(problems(), shapes, st.sampled_from(sorted(DTYPES)), st.data())
@examples(40)
def test_any_problem(problem: Problem, shape: TileShape, dtype: str, data: st.DataObject) -> None:
    mask = problem.mask
    if data.draw(st.booleans()):
        mask &= data.draw(tile_masks(problem.len_q, problem.len_k, TileShape(2 * shape.m, 3 * shape.n)))
    problem = replace(problem, dim=8, dtype=dtype, mask=mask)
    policy = data.draw(st.sampled_from(["auto", *applicable(tile(problem, shape))]))
    check(problem, shape, policy, FEW)
    given_, planned = operands(problem), ordered(problem, shape, policy)
    assert not difference(run(planned, given_, threads=1), run(planned, given_, workers=3, threads=3, jitter=1e-4))
