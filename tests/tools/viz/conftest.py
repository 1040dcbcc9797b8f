"""Small simulations to draw."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dash_attn.launch import compose
from dash_attn.pack import Pack
from dash_attn.problem import CAUSAL, FULL, Problem, documents
from dash_attn.simulate import Model, Paper, Simulation, Tickets, simulate
from dash_attn.tiling import TileShape, tile

Simulate = Callable[..., Simulation]


@pytest.fixture(scope="session")
def simulated() -> Simulate:
    """simulated(policy, n, heads, workers, model): n x n tiles in each head."""

    def run(
        policy: str, n: int = 4, heads: int = 2, workers: int | None = None, model: Model | None = None
    ) -> Simulation:
        mask = FULL if policy == "shift" else CAUSAL
        order = compose(tile(Problem(1, heads, heads, 2 * n, 2 * n, mask=mask), TileShape(2, 2)), policy)
        return simulate(order, workers or n, model or Paper(1.0, 0.35))

    return run


@pytest.fixture(scope="session")
def packed() -> Simulation:
    """Three documents of 4, 2 and 6 tiles, two q heads of one kv head, chains cut by q head."""
    mask = documents([0, 8, 12, 24], causal=True)
    pack = Pack(Problem(1, 2, 1, 24, 24, mask=mask), lambda _: TileShape(2, 2), "fa3@head")
    return simulate(Tickets.of(pack), 4, Paper(1.0, 0.35))
