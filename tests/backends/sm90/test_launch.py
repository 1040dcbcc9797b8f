"""The host's side of the backward, with the CPU as the device and a kernel that only copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dash_attn.backends import Gradients, Operands, Options
from dash_attn.backends.sm90 import backend, launch, workspace
from dash_attn.plan import plan
from dash_attn.problem import Problem

PROBLEM = Problem(2, 4, 2, 40, 30, 64)
SHAPES = ((2, 40, 4, 64), (2, 30, 2, 64), (2, 30, 2, 64))


class Kernels:
    """dq = q, dk = k, dv = v. All tensors must be what bulk loads and stores take."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, ...]] = []

    def prepare(self, tensors: tuple[Tensor, ...], stats: object, extra: object) -> None:
        assert tensors[2].is_contiguous()

    def main(self, tensors: tuple[Tensor, ...], *_: object) -> None:
        assert all(x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and x.stride(1) % 8 == 0 for x in tensors)
        self.given.append(tensors)
        q, _, k, v, *grads = tensors
        for grad, x in zip(grads, (q, k, v), strict=True):
            grad.copy_(x)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    stub = Kernels()
    monkeypatch.setattr(backend, "resident_workers", lambda device: 132)
    monkeypatch.setattr(launch, "kernels", lambda *_: (stub.prepare, stub.main, None, lambda *_: None))
    for module in (launch, workspace):
        monkeypatch.setattr(module, "converted", lambda tensors: tensors)
    return stub


@pytest.fixture
def run(kernels: Kernels) -> launch.Launch:
    cpu = torch.device("cpu")
    return backend.launch_of(plan(PROBLEM, backend.Sm90Backend(cpu).tile_shape(PROBLEM)), Options(), cpu)


def contiguous(x: Tensor) -> Tensor:
    return x.clone()


def shifted(x: Tensor) -> Tensor:
    """Strides as before, and a start that is not a multiple of 16 bytes."""
    room = x.new_empty(x.numel() + 1)[1:].view_as(x)
    return room.copy_(x)


def sliced(x: Tensor) -> Tensor:
    """Every second head of a tensor, which needs no copy."""
    return x.repeat_interleave(2, 2)[:, :, ::2]


def uneven(x: Tensor) -> Tensor:
    """Rows that do not begin at multiples of 16 bytes."""
    return torch.nn.functional.pad(x, (0, 1))[..., :-1]


def operands_of(layout: Callable[[Tensor], Tensor]) -> Operands:
    q, k, v = (layout(torch.randn(shape).bfloat16()) for shape in SHAPES)
    lse = torch.zeros(2, 4, 41)[..., :40] if layout is uneven else torch.zeros(2, 4, 40)
    return Operands(layout(torch.zeros(SHAPES[0]).bfloat16()), q, k, v, layout(torch.zeros(SHAPES[0]).bfloat16()), lse)


def equal(grads: Gradients, operands: Operands) -> bool:
    return all(torch.equal(grad, x) for grad, x in zip(grads, operands.qkv, strict=True))


LAYOUTS = pytest.mark.parametrize("layout", [contiguous, shifted, sliced, uneven], ids=lambda layout: layout.__name__)


@LAYOUTS
def test_new_gradients_are_contiguous(layout: Callable[[Tensor], Tensor], run: launch.Launch, kernels: Kernels) -> None:
    for seen in (contiguous, layout, layout):  # strides that an earlier call had, and new ones
        operands = operands_of(seen)
        grads = run(operands)
        assert equal(grads, operands) and all(x.is_contiguous() for x in grads)
        assert all(x is y for x, y in zip(grads, kernels.given[-1][4:], strict=True)), "made once"
        as_given = all(x is y for x, y in zip(kernels.given[-1][2:4], operands[2:4], strict=True))
        assert as_given == (seen in (contiguous, sliced)), "copied if and only if it is necessary"


@LAYOUTS
def test_given_gradients_are_written(layout: Callable[[Tensor], Tensor], run: launch.Launch, kernels: Kernels) -> None:
    operands = operands_of(contiguous)
    for rooms in (contiguous, layout, layout):
        into = Gradients(*(rooms(torch.zeros(shape).bfloat16()) for shape in SHAPES))
        assert run(operands, into) is into and equal(into, operands)
        as_given = all(x is y for x, y in zip(kernels.given[-1][4:], into, strict=True))
        assert as_given == (rooms in (contiguous, sliced))


def test_a_dimension_of_size_1_may_have_any_stride(run: launch.Launch) -> None:
    """Such a tensor is contiguous to torch. Gradients still have the usual strides."""
    cpu, problem = torch.device("cpu"), Problem(1, 4, 2, 40, 30, 64)
    one = backend.launch_of(plan(problem, backend.Sm90Backend(cpu).tile_shape(problem)), Options(), cpu)
    q, k = (torch.randn(1, *shape[1:]).bfloat16() for shape in SHAPES[:2])
    odd = q.as_strided(q.shape, (8, *q.stride()[1:]))
    for _ in range(2):
        grads = one(Operands(q, odd, k, k, q, torch.zeros(1, 4, 40)))
        assert odd.is_contiguous() and grads.dq.stride() == q.stride() and torch.equal(grads.dq, q)
