"""The host's side of the tracing build, with the CPU as the device and no kernel behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dash_attn.backends import Gradients, Operands, Options
from dash_attn.backends.sm90 import backend, builds, launch
from dash_attn.backends.sm90.config import DEBUG, STAMPS, TRACE
from dash_attn.plan import Plan, placement, plan
from dash_attn.problem import CAUSAL, Problem

PROBLEM = Problem(1, 4, 2, 1000, 1000, 128, mask=CAUSAL)
CPU = torch.device("cpu")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the main kernel is called with."""
    calls: list[Any] = []
    monkeypatch.setattr(backend, "resident_workers", lambda device: 7)
    monkeypatch.setattr(
        launch, "kernels", lambda *_: (lambda *args: None, lambda *args: calls.append(args), None, None)
    )
    return calls


def planned() -> Plan:
    return plan(PROBLEM, backend.Sm90Backend(CPU).tile_shape(PROBLEM), "auto@group")  # cut chains have no trace


def tensors() -> tuple[Operands, Gradients]:
    q, k = (torch.zeros(1, 1000, heads, 128, dtype=torch.bfloat16) for heads in (4, 2))
    return Operands(q, q, k, k, q, torch.zeros(1, 4, 1000)), Gradients(*(torch.empty_like(x) for x in (q, k, k)))


def test_the_buffer_has_a_row_for_every_entry(given: list[Any]) -> None:
    tracing = backend.launch_of(planned(), Options(kernel=TRACE), CPU)
    placed, lengths = placement(planned(), 7), np.diff(planned().program.task_first)
    spans = zip(placed.first[:-1], placed.first[1:], strict=True)
    most = max(sum(1 + lengths[chain] for chain in placed.chains[a:b]) for a, b in spans)
    events = builds.TraceBuffers.of(tracing.tables).events
    assert events.shape == (7, 1 + most, len(STAMPS)) and events.dtype == torch.int64


def test_the_kernel_is_given_the_buffer(given: list[Any]) -> None:
    tracing = backend.launch_of(planned(), Options(kernel=TRACE), CPU)
    events = builds.trace(tracing, *tensors())
    (_, stats, _, facts), *others = given
    assert len(others) == 3 and stats[-1].shape == events.shape and len(stats) == 5 and len(facts) == 2


def test_builds_are_not_mixed_up(given: list[Any]) -> None:
    plain, tracing = (backend.launch_of(planned(), Options(kernel=kind), CPU) for kind in ((), TRACE))
    with pytest.raises(ValueError, match=r"builds\.trace"):
        tracing(*tensors())
    with pytest.raises(ValueError, match=r"builds\.trace"):
        builds.trace(plain, *tensors())
    with pytest.raises(ValueError, match="choose one"):
        backend.launch_of(planned(), Options(kernel=(*TRACE, *DEBUG)), CPU)


def test_too_large_a_margin_is_named(given: list[Any]) -> None:
    with pytest.raises(ValueError, match="sm_margin=7 leaves 0 SMs"):
        backend.launch_of(planned(), Options(sm_margin=7), CPU)
