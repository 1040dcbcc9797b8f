"""The forward against float64, under every mask."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.backends.cpu.forward import forward
from dash_attn.problem import CAUSAL, FULL, Problem, documents, window
from dash_attn.tools.bench.operands import draw, exact
from tests.backends.cpu.reference import CPU, error
from tests.strategies import examples, problems, tile_masks

TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}


def check(problem: Problem, seed: int = 0) -> None:
    drawn = draw(problem, CPU, seed)
    q, k, v = drawn[1:]
    out, lse = forward(problem, q, k, v)
    expected = exact(problem, *drawn)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (problem.batch, problem.heads_q, problem.len_q) and lse.dtype == torch.float32
    blind = expected.lse == -math.inf
    assert torch.equal(lse == -math.inf, blind)
    assert not out.transpose(1, 2)[blind].any()
    assert error(out, expected.out) <= TOLERANCE[problem.dtype]
    assert error(lse[~blind], expected.lse[~blind]) <= TOLERANCE[problem.dtype]


@given(problems(), st.sampled_from(sorted(TOLERANCE)), st.data())
@examples(40)
def test_any_problem(problem: Problem, dtype: str, data: st.DataObject) -> None:
    mask = problem.mask
    if data.draw(st.booleans()):
        mask &= data.draw(tile_masks(problem.len_q, problem.len_k))
    check(replace(problem, dim=8, dtype=dtype, mask=mask))


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize(
    ("mask", "len_q", "len_k"),
    [
        (FULL, 300, 700),
        (CAUSAL, 700, 700),
        (CAUSAL, 300, 700),
        (CAUSAL, 700, 300),
        (window(40, 5), 700, 700),
        (documents([0, 90, 90, 600, 700], causal=True), 700, 700),
    ],
    ids=str,
)
def test_longer_than_a_tile(mask: object, len_q: int, len_k: int, dtype: str) -> None:
    check(Problem(1, 4, 2, len_q, len_k, 16, dtype, 0.3, mask))
