"""Features of a problem on the Hopper backend, without a GPU: what is refused."""

from __future__ import annotations

import pytest
import torch

from dash_attn.backends.sm90 import backend
from dash_attn.problem import Features, Problem

PLAIN = Problem(1, 4, 2, 300, 300, 128)


def posed(**features: object) -> Problem:
    return Problem(1, 4, 2, 300, 300, 128, features=Features(**features))


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (posed(dropout=0.1), r"dropout is 0\.1: on GPUs .*leave it at 0, or .*\.cpu\(\)"),
        (posed(dim_v=64), r"v has head dim 64, and q has 128: .*pad"),
    ],
)
def test_refused_before_the_forward_runs(problem: Problem, says: str) -> None:
    for ask in (backend.Sm90Backend(torch.device("cuda")).forward, backend.config_of):
        with pytest.raises(NotImplementedError, match=says):
            ask(problem)


def test_a_head_dim_of_v_that_is_that_of_q_changes_nothing() -> None:
    assert backend.config_of(posed(dim_v=128)) == backend.config_of(PLAIN)
