"""A layout of documents never seen before is planned fast enough to come with every step of a training run."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dash_attn.plan import placement, plan
from dash_attn.problem import Problem, documents
from dash_attn.tiling import TileShape


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [TileShape(64, 128), TileShape(128, 128)], ids=str)
def test_planning_a_new_layout(shape: TileShape, causal: bool) -> None:
    """1 to 3 ms on an idle core (benchmarks/plan_speed.py); the limit is for a busy one."""
    rng, seconds = np.random.default_rng(0), []
    for _ in range(12):
        cuts = np.sort(rng.choice(np.arange(1, 32768), 63, replace=False))
        begin = time.process_time()
        problem = Problem(1, 32, 8, 32768, 32768, mask=documents([0, *cuts.tolist(), 32768], causal=causal))
        planned = plan(problem, shape)
        assert len(placement(planned, 132).first) == 133
        seconds.append(time.process_time() - begin)
    assert np.median(seconds) < 0.04
