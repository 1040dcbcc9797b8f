"""Problems: what they derive, and what they refuse."""

from __future__ import annotations

import dataclasses

import pytest

from dash_attn.problem import CAUSAL, Problem, tiles


def test_derived_sizes() -> None:
    problem = Problem(2, 8, 2, 100, 200, dim=64)
    assert problem.group == 4
    assert problem.softmax_scale == 0.125
    assert dataclasses.replace(problem, scale=0.5).softmax_scale == 0.5


def test_problems_are_values() -> None:
    a, b = (Problem(1, 2, 2, 8, 8, mask=CAUSAL) for _ in range(2))
    assert a == b and hash(a) == hash(b)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.batch = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", ["batch", "heads_q", "heads_kv", "dim"])
def test_sizes_start_at_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Problem(**{"batch": 1, "heads_q": 1, "heads_kv": 1, "len_q": 1, "len_k": 1, "dim": 8, name: 0})


def test_errors_say_what_was_wrong() -> None:
    Problem(1, 1, 1, 0, 0)
    with pytest.raises(ValueError, match="len_k must not be negative, got -1"):
        Problem(1, 1, 1, 4, -1)
    with pytest.raises(ValueError, match="multiple of heads_kv, got 6 and 4"):
        Problem(1, 6, 4, 4, 4)
    with pytest.raises(ValueError, match=r"tiles\(1x1 of 64x64\) does not cover 128 queries x 64 keys"):
        Problem(1, 1, 1, 128, 64, mask=tiles([[1]], 64, 64))
