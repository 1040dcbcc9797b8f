"""The bar for the simulator: a quarter of a million tasks in half a second, once compiled."""

from __future__ import annotations

import time

import pytest

from dash_attn.launch import compose
from dash_attn.problem import CAUSAL, Problem
from dash_attn.simulate import Machine, Model, Paper, simulate
from dash_attn.tiling import TileShape, tile


@pytest.mark.parametrize("model", [Paper(), Machine()], ids=lambda model: model.name)
@pytest.mark.parametrize("policy", ["fa3", "symmetric_shift", "search"])
def test_264_thousand_tasks(policy: str, model: Model) -> None:
    """16k tokens, causal, 16 heads. The time of the process, not of the clock: other tests run beside this one."""
    problem = Problem(1, 16, 16, 16384, 16384, mask=CAUSAL)
    program = compose(tile(problem, TileShape(64, 128)), policy)
    assert program.num_tasks == 264_192
    times = []
    for _ in range(3):
        begin = time.process_time()
        simulate(program, 132, model)
        times.append(time.process_time() - begin)
    assert min(times) < 0.5
