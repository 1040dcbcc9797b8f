"""The host's side of the debug build. Tensors lie on the CPU, and no kernel runs."""

from __future__ import annotations

import pytest
import torch

from dash_attn.backends.sm90 import backend as hopper
from dash_attn.backends.sm90 import launch
from dash_attn.backends.sm90.config import REPORT, KernelConfig, select, with_debug
from dash_attn.plan import plan
from dash_attn.problem import Problem
from dash_attn.tiling import TileShape

PROBLEM = Problem(1, 2, 2, 200, 300, 128)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(launch, "resident_workers", lambda device: 132)
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **how: zeros(*shape, **how))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def arguments(cfg: KernelConfig) -> tuple[launch.DeviceTables, launch.Inputs]:
    tables = hopper.tables_of(plan(PROBLEM, TileShape(cfg.tile_m, cfg.tile_n)), cfg, 132, torch.device("cpu"))
    q, k = (torch.zeros(1, length, 2, 128, dtype=torch.bfloat16) for length in (PROBLEM.len_q, PROBLEM.len_k))
    return tables, launch.Inputs(q, q, k, k, q, torch.zeros(1, 2, PROBLEM.len_q))


def test_contributions_are_kept_by_plane_tile_turn_and_half(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = with_debug(select(128, "bf16", "full"))
    monkeypatch.setattr(launch, "Launch", lambda *made: lambda *given: None)
    kept = launch.debug_backward(cfg, *arguments(cfg), scale=1.0)
    assert kept.contributions.shape == (2, 4, 3, 64 * 128) and kept.contributions.isnan().all()
    assert kept.dq_sum.shape == (2, 4, 64 * 128)


def test_who_waits_for_what_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = with_debug(select(128, "bf16", "full"))
    row = dict(stuck=1, worker=2, writer=1, entry=7, q_tile=3, plane=1, wanted=4, seen=2)

    def trap(*args: object) -> None:
        args[-1].reports[2, 1] = torch.tensor([row[name] for name in REPORT])
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(launch, "Launch", lambda *made: trap)
    says = r"not come:\n  worker 2, writer 1, entry 7: q tile 3 of plane 1 at turn 2, waits for 4$"
    with pytest.raises(RuntimeError, match=says):
        launch.debug_backward(cfg, *arguments(cfg), scale=1.0)


def test_other_failures_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = with_debug(select(128, "bf16", "full"))

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(launch, "Launch", lambda *made: fail)
    with pytest.raises(RuntimeError, match=r"^out of memory"):
        launch.debug_backward(cfg, *arguments(cfg), scale=1.0)


def test_builds_are_not_mixed_up() -> None:
    plain = select(128, "bf16", "full")
    for run, cfg in ((launch.backward, with_debug(plain)), (launch.debug_backward, plain)):
        with pytest.raises(ValueError, match="debug_backward"):
            run(cfg, *arguments(cfg), scale=1.0)
