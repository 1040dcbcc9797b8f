"""A traced backward on a Hopper GPU: the same bits, every stamp there, and times that fit together.

make gpu-test
"""

from __future__ import annotations

import numpy as np
import pytest

from dash_attn.problem import CAUSAL, FULL, Problem, documents

pytestmark = pytest.mark.gpu


CU = [0, 700, 710, 1400, 1400, 2048, 4096]
PACKS = [
    Problem(1, heads, 2, CU[-1], CU[-1], dim, mask=documents(CU, causal=causal))
    for dim, heads, causal in ((64, 8, True), (128, 8, True), (128, 2, False))
]


# Short: the last contributor finishes dQ. Long: a pass of its own does. Head dim 64: turns of half tiles. Eight q heads
# of two kv heads: cut chains.
@pytest.mark.parametrize(
    "problem",
    [
        Problem(2, 8, 8, 1024, 1024, 64, mask=CAUSAL),
        Problem(2, 8, 8, 4096, 4096, 64, mask=FULL),
        Problem(2, 8, 8, 1024, 1024, 128, mask=FULL),
        Problem(2, 8, 8, 4096, 4096, 128, mask=CAUSAL),
        Problem(2, 8, 2, 1024, 1024, 64, mask=CAUSAL),
        Problem(2, 8, 2, 4096, 4096, 128, mask=CAUSAL),
        *PACKS,
        Problem(1, 8, 2, 4096, 4096, 128, mask=CAUSAL, panels=4),
    ],
)
def test_stamps_follow_each_other(problem: Problem) -> None:
    from dash_attn.tools.trace.measured import measured
    from dash_attn.tools.trace.run import trace_problem

    trace = trace_problem(problem)
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
    tasks = trace.board.tasks()
    order = np.lexsort((tasks.turn, tasks.target))
    same = tasks.target[order][1:] == tasks.target[order][:-1]
    assert (np.diff(task["landed"][order])[same] > -2.0).all()
    us = trace.facts["us"]
    assert run.makespan < 1.5 * us["call"] + 20
