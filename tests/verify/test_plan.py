"""Plans: verified once, kept, and refused on too few workers."""

from __future__ import annotations

import pytest

from dash_attn.plan import placement, plan
from dash_attn.problem import CAUSAL, Problem
from dash_attn.tiling import TileShape
from dash_attn.verify import VerifyError


def test_plans_are_kept() -> None:
    shape = TileShape(2, 2)
    first, second = (plan(Problem(1, 2, 2, 16, 16, mask=CAUSAL), shape) for _ in range(2))
    assert first is second and first.fingerprint == first.program.fingerprint
    assert first.co_resident == 1 and first.program.policy == "level"
    assert placement(first, 5) is placement(first, 5)
    assert len(placement(first, 5).first) == 6


def test_too_few_workers_are_refused() -> None:
    planned = plan(Problem(1, 1, 1, 16, 16), TileShape(2, 2), "shift:4")
    assert planned.co_resident == 4
    with pytest.raises(VerifyError, match="deadlock with 3 co-resident workers: this order needs 4"):
        placement(planned, 3)
