"""Plans: verified once, kept, and refused on too few workers."""

from __future__ import annotations

import pytest

from dash_attn.plan import placement, plan
from dash_attn.problem import CAUSAL, Problem
from dash_attn.tiling import TileShape
from dash_attn.verify import TooFewWorkers


def test_plans_are_kept() -> None:
    shape = TileShape(2, 2)
    first, second = (plan(Problem(1, 2, 2, 16, 16, mask=CAUSAL), shape) for _ in range(2))
    assert first is second
    assert first.co_resident == 4 and first.program.policy == "symmetric_shift:64"
    placed = placement(first, 5)
    assert placement(second, 5) is placed and len(placed.first) == 6


def test_too_few_workers_are_refused() -> None:
    planned = plan(Problem(1, 1, 1, 16, 16), TileShape(2, 2), "shift:4")
    assert planned.co_resident == 4
    with pytest.raises(TooFewWorkers, match="needs 4 co-resident workers, 3 are there") as error:
        placement(planned, 3)
    assert (error.value.needed, error.value.workers) == (4, 3)
    assert len(placement(planned, 4).first) == 5
