"""The host's side of the debug build, with the CPU as the device and no kernel behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dash_attn.backends import Gradients, Operands, Options
from dash_attn.backends.sm90 import backend, builds, launch
from dash_attn.backends.sm90.config import DEBUG, REPORT
from dash_attn.plan import plan
from dash_attn.problem import Problem

PROBLEM = Problem(1, 2, 2, 200, 300, 128)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(backend, "resident_workers", lambda device: 132)
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **how: zeros(*shape, **how))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def debugged(monkeypatch: pytest.MonkeyPatch, run: Callable[..., None]) -> builds.Debugged:
    """The outcome of a debug build whose launch is `run`."""
    monkeypatch.setattr(launch, "kernels", lambda *_: (None, None, None, None))
    monkeypatch.setattr(launch.Launch, "__call__", run)
    planned = plan(PROBLEM, backend.Sm90Backend(CPU).tile_shape(PROBLEM))
    q, k = (torch.zeros(1, length, 2, 128, dtype=torch.bfloat16) for length in (PROBLEM.len_q, PROBLEM.len_k))
    operands = Operands(q, q, k, k, q, torch.zeros(1, 2, PROBLEM.len_q))
    debugging = backend.launch_of(planned, Options(kernel=DEBUG), CPU)
    return builds.debug(debugging, operands, Gradients(*(torch.empty_like(x) for x in (q, k, k))))


def test_contributions_are_kept_by_plane_tile_turn_and_half(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = debugged(monkeypatch, lambda *given, **how: None)
    assert kept.contributions.shape == (2, 4, 3, 64 * 128) and kept.contributions.isnan().all()
    assert kept.dq_sum.shape == (2, 4, 64 * 128)


def test_who_waits_for_what_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dict(stuck=1, worker=2, writer=1, entry=7, q_tile=3, plane=1, wanted=4, seen=2)

    def trap(*args: object, **how: builds.DebugBuffers) -> None:
        how["buffers"].reports[2, 1] = torch.tensor([row[name] for name in REPORT])
        raise RuntimeError("unspecified launch failure")

    says = r"not come:\n  worker 2, writer 1, entry 7: q tile 3 of plane 1 at turn 2, waits for 4$"
    with pytest.raises(RuntimeError, match=says):
        debugged(monkeypatch, trap)


def test_other_failures_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **how: object) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"^out of memory"):
        debugged(monkeypatch, fail)
