"""A layout of documents never seen before is assembled fast enough to come with every step of a training run."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dash_attn.pack import assemble
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from dash_attn.tiling import TileShape

pytest.importorskip("numba", reason="without numba loops run as plain Python")
SHAPE = TileShape(64, 128)


def problems(count: int, tokens: int, kind: Mask) -> list[Problem]:
    """Layouts, each as a problem that nobody has looked at."""
    rng = np.random.default_rng(0)
    cuts = [np.sort(rng.choice(np.arange(1, tokens), count - 1, replace=False)).tolist() for _ in range(40)]
    return [Problem(1, 32, 8, tokens, tokens, mask=kind & documents([0, *cut, tokens])) for cut in cuts]


def seconds(count: int, tokens: int, kind: Mask) -> float:
    """Of this thread, to assemble and check a layout whose templates are known."""
    for problem in problems(count, tokens, kind):
        assemble(problem, SHAPE)
    times = []
    for _ in range(5):
        for problem in problems(count, tokens, kind):
            begin = time.thread_time()
            assemble(problem, SHAPE)
            times.append(time.thread_time() - begin)
    return min(times)  # other work on the machine slows most of them


@pytest.mark.parametrize("kind", [CAUSAL, FULL, window(512, 0), window(256, 256)], ids=str)
@pytest.mark.parametrize(("count", "limit"), [(64, 0.3e-3), (1000, 2e-3)])
def test_assembling_a_new_layout(count: int, limit: float, kind: Mask) -> None:
    assert seconds(count, 32768, kind) < limit


def test_the_time_is_linear_in_the_documents() -> None:
    few, many = (seconds(count, 32 * count, CAUSAL) for count in (1000, 8000))
    assert many < 20 * few  # quadratic would be 64 times as long
