"""A traced backward on a Hopper GPU: the same bits, every stamp there, and times that fit together.

make gpu-test
"""

from __future__ import annotations

import numpy as np
import pytest

from dash_attn.problem import CAUSAL, FULL, Problem

pytestmark = pytest.mark.gpu


# Short: the last contributor finishes dQ. Long: a pass of its own does. Head dim 64: turns of half tiles.
@pytest.mark.parametrize(
    ("dim", "length", "mask"), [(64, 1024, CAUSAL), (64, 4096, FULL), (128, 1024, FULL), (128, 4096, CAUSAL)]
)
def test_stamps_follow_each_other(dim: int, length: int, mask: object) -> None:
    from dash_attn.tools.trace.measured import measured
    from dash_attn.tools.trace.run import trace_problem

    trace = trace_problem(Problem(2, 8, 8, length, length, dim, mask=mask))
    assert trace.facts["same_bits"]
    run = measured(trace)
    task = run.task
    for a, b in (
        ("begun", "computed"),
        ("computed", "slot"),
        ("slot", "staged"),
        ("staged", "left"),
        ("turn", "landed"),
    ):
        assert (task[a] <= task[b] + 1e-3).all(), f"{a} behind {b}"
    assert (task["staged"] <= task["landed"] + 1e-3).all() and (task["loaded"] <= task["begun"] + 1e-3).all()
    assert len(np.unique(run.sm)) == len(run.sm), "one worker on each SM"
    # A contribution lands before the next one of its tile does: on different SMs, so up to the clocks' agreement.
    tasks = trace.program.expand()
    order = np.lexsort((tasks.turn, tasks.target))
    same = tasks.target[order][1:] == tasks.target[order][:-1]
    assert (np.diff(task["landed"][order])[same] > -2.0).all()
    us = trace.facts["us"]
    assert run.makespan < 1.5 * us["call"] + 20
