"""Streams that use uploaded tensors are told to torch's allocator. torch and its streams are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn.backends import Extras, Operands, Options
from dash_attn.backends.sm90 import backend, fa4, forwards, packing, tables
from dash_attn.backends.sm90.packing import packing_of, spread_of
from dash_attn.backends.sm90.tables import Uploads, uploaded
from dash_attn.plan import plan
from dash_attn.problem import CAUSAL, Features, Problem, documents, tiles
from tests.backends.sm90.test_forwards import DOCUMENTS, installed, libraries, posed, spread_on_the_cpu
from tests.backends.sm90.test_launch import PROBLEM, SHAPES, Kernels, kernels

__all__ = ["installed", "kernels", "libraries", "spread_on_the_cpu"]  # fixtures


class OnGpu:
    """A tensor of a GPU, as far as Uploads knows it."""

    device = SimpleNamespace(type="cuda", index=1)

    def __init__(self) -> None:
        self.streams: list[str] = []

    def record_stream(self, stream: str) -> None:
        self.streams.append(stream)


def test_every_stream_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    current = {0: 10, 1: 11}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current.__getitem__, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream {current[device]}")
    first, second = OnGpu(), OnGpu()
    uploads = Uploads(first, None, second)  # type: ignore[arg-type]
    assert [uploads.used(), uploads.used()] == [11, 11]
    current[1] = 12
    assert uploads.used() == 12
    assert first.streams == second.streams == ["stream 11", "stream 12"]
    assert Uploads(torch.zeros(3)).used() == 0


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The memory that was uploaded, and that whose use was told."""
    seen, original = SimpleNamespace(uploaded=set[int](), used=set[int]()), Uploads.used

    def upload(x: Tensor, device: torch.device) -> Tensor:
        copy = uploaded(x.clone(), device)
        kept.append(copy)
        seen.uploaded.add(copy.untyped_storage().data_ptr())
        return copy

    def used(self: Uploads) -> int:
        seen.used |= {x.untyped_storage().data_ptr() for x in self.tensors}
        return original(self)

    kept = list[Tensor]()
    for module in (tables, packing, fa4):
        monkeypatch.setattr(module, "uploaded", upload)
    monkeypatch.setattr(Uploads, "used", used)
    packing_of.cache_clear()
    spread_of.cache_clear()
    return seen


SINKS = Features(sinks=True)
FORWARDS: list[Any] = [
    ("fa4", posed(DOCUMENTS)),
    ("fa4", posed(documents([0, 10, 50], [0, 0, 40]))),
    ("fa4", posed(documents([0, 10, 50], [0, 0, 40]), features=SINKS)),
    ("fa4", posed(CAUSAL, features=SINKS)),
    ("torch", posed(DOCUMENTS)),
    ("flex", posed(tiles([[1, 0, 1], [0, 0, 1], [0, 0, 0]], 20, 16) & CAUSAL)),
]


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("key", "problem"), FORWARDS)
def test_every_forward_tells_that_it_uses_its_tensors(
    key: str, problem: Problem, noted: SimpleNamespace, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(forwards.VARIABLE, key)
    q, k = torch.randn(2, problem.len_q, 4, 16), torch.randn(2, problem.len_k, 2, 16)
    run = forwards.LibraryForward(problem)
    given = [Extras(sinks=torch.zeros(4))] if problem.features.sinks else []
    for _ in range(2):
        noted.used.clear()
        run(q, k, k, *given)
        assert noted.uploaded and noted.used == noted.uploaded


def test_a_backward_tells_that_it_uses_its_tables(noted: SimpleNamespace, kernels: Kernels) -> None:
    cpu = torch.device("cpu")
    run = backend.launch_of(plan(PROBLEM, backend.Sm90Backend(cpu).tile_shape(PROBLEM)), Options(), cpu)
    q, k, v = (torch.zeros(shape).bfloat16() for shape in SHAPES)
    for _ in range(2):
        noted.used.clear()
        run(Operands(q, q, k, v, q, torch.zeros(2, 4, 40)))
        assert noted.uploaded and noted.used == noted.uploaded
