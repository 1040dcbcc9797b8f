"""What a layer of torch.nn computes is read in part, and what other code computes is read whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn.watching.difference import Difference
from dash_attn.watching.files import Record, Step, load_run
from dash_attn.watching.fingerprint import LARGE
from dash_attn.watching.scope import SHARE
from dash_attn.watching.tensors import is_layer
from tests.watching.small import difference, same
from tests.watching.test_watcher import value

WIDTH = 512
SHAPE = WIDTH, WIDTH
assert WIDTH * WIDTH * 4 == LARGE
ELEMENTS = [0, 777, 100_003, WIDTH * WIDTH - 1]


class Own(torch.autograd.Function):
    """The identity. In one run its forward or its backward adds to one element."""

    in_forward: int | None = None
    in_backward: int | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return added(x, Own.in_forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return added(gradient, Own.in_backward)


def added(x: Tensor, element: int | None) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    if element is not None:
        out.view(-1)[element] += 1
    return out


@pytest.fixture(autouse=True)
def no_fault() -> Iterator[None]:
    yield
    Own.in_forward = Own.in_backward = None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 3, WIDTH).unbind(1)
        return self.out(Own.apply(q) * k + v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x * 2 + self.mlp(self.norm2(x))


class SubLinear(nn.Linear):
    """Its class is not torch.nn's own."""

    def forward(self, x: Tensor) -> Tensor:
        return Own.apply(super().forward(Own.apply(x)))


def recorded(to: Path, make: Callable[[], nn.Module], see: bool = False, **how: Any) -> Record:
    """One step. `see` is shown the input, the output, and the input of every GELU."""
    torch.manual_seed(0)
    model, x, factors = make(), torch.randn(SHAPE), torch.randn(SHAPE)
    with dash_attn.watch(model, to=to, **how) as watcher:
        if see:
            watcher.see("x", x)
            for part in model.modules():
                if isinstance(part, nn.GELU):
                    part.register_forward_pre_hook(lambda _, args: watcher.see("made", args[0]), prepend=True)
        out = model(x)
        if see:
            watcher.see("out", out)
        (out * factors).sum().backward()
    return load_run(to)[0]


def read_whole(step: Step, phase: str) -> dict[str, bool]:
    """Of each large tensor of a phase: was it read whole?"""
    large = [row for row in step.rows if row.phase == phase and str(WIDTH) in step.form(row)]
    return {f"{row.module}:{row.tensor}": step.is_whole(row) for row in large if row.tensor in ("input", "output")}


@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.LayerNorm(2), nn.GELU(), nn.Embedding(2, 2), nn.Dropout()])
def test_layers(layer: nn.Module) -> None:
    assert is_layer(layer)


@pytest.mark.parametrize(
    "module",
    [
        SubLinear(2, 2),
        Attention(),
        nn.Sequential(nn.Linear(2, 2)),
        nn.MultiheadAttention(2, 1),
        parametrizations.weight_norm(nn.Linear(2, 2)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_modules(module: nn.Module) -> None:
    assert not is_layer(module)


FORWARD = {
    "norm1:input": True,
    "norm1:output": False,
    "attention:input": False,
    "attention.qkv:input": False,
    "attention.qkv:output": False,
    "attention.out:input": True,  # attention has made it
    "attention.out:output": False,
    "attention:output": False,
    "norm2:input": True,  # a sum
    "norm2:output": False,
    "mlp:input": False,
    "mlp.0:input": False,
    "mlp.0:output": False,
    "mlp.1:input": False,
    "mlp.1:output": False,
    "mlp.2:input": False,
    "mlp.2:output": False,
    "mlp:output": False,
    ":output": True,
}
BACKWARD = {
    ":output": True,  # the loss has made it
    "mlp.2:output": True,
    "mlp.1:output": False,
    "mlp.0:output": False,
    "norm2:output": False,
    "norm2:input": False,  # made by a layer and by a sum
    "attention.out:input": False,
    "attention.qkv:output": True,  # the backward of attention has made it
    "norm1:output": False,
}


def test_what_is_read_whole(tmp_path: Path) -> None:
    step = recorded(tmp_path, Block).steps[0]
    assert read_whole(step, "data") == {":input": True}
    assert read_whole(step, "forward") == FORWARD
    gradients = read_whole(step, "backward")
    # A sum hands on the gradient that it gets: one tensor, which is read once.
    assert value(step, "backward", "attention.out:output") == value(step, "backward", "norm2:input")
    assert not gradients.pop("attention.out:output")
    assert gradients == BACKWARD
    assert all(step.is_whole(row) for row in step.rows if "weight" in row.tensor)


def test_with_a_share_of_one_all_is_read_whole(tmp_path: Path) -> None:
    step = recorded(tmp_path, Block, share=1).steps[0]
    assert all(step.is_whole(row) for row in step.rows)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again(tmp_path: Path, reentrant: bool) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x.requires_grad_(), use_reentrant=reentrant)

    runs = [recorded(tmp_path / name, Again) for name in "ab"]
    assert same(*runs)
    step = runs[0].steps[0]
    rows = read_whole(step, "recompute").items()
    again = {name.removeprefix("block").removeprefix("."): whole for name, whole in rows}
    assert again.items() <= {":input": True, **FORWARD}.items()
    assert {"attention.qkv:output", "attention.out:input", "norm2:input"} <= again.keys()
    gradients = read_whole(step, "backward")
    assert gradients["block.attention.qkv:output"] and not gradients["block.mlp.1:output"]


def test_modules_inside_that_are_not_recorded_count_as_other_code(tmp_path: Path) -> None:
    step = recorded(tmp_path, lambda: nn.Sequential(Block(), Block()), depth=1).steps[0]
    assert set(read_whole(step, "forward").values()) == set(read_whole(step, "backward").values()) == {True}


def test_a_layer_that_writes_to_its_input(tmp_path: Path) -> None:
    """The tensor before it is written goes to a layer, and the same tensor afterwards to other code."""

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), Doubles())

    step = recorded(tmp_path, make).steps[0]
    gradients = read_whole(step, "backward")
    assert (gradients["0:output"], gradients["1:output"]) == (False, True)


def test_no_tensor_is_read_twice(tmp_path: Path) -> None:
    """Not even if it was shown to `see`, unless a layer has made it. Fingerprints do not depend on it."""
    plain, shown = (recorded(tmp_path / str(see), Block, see).steps[0] for see in (False, True))
    places = {(row.phase, row.module, row.tensor): row.place for row in shown.rows}
    assert places["data", "", "x"] == places["data", "", "input"] == places["forward", "norm1", "input"]
    assert places["data", "", "out"] == places["forward", "", "output"]
    assert places["data", "", "made"] != places["forward", "mlp.0", "output"] == places["forward", "mlp.1", "input"]
    kept = [row for row in shown.rows if row.tensor not in ("x", "made", "out")]
    assert [row[:3] for row in kept] == [row[:3] for row in plain.rows]
    assert [shown.form(row) for row in kept] == [plain.form(row) for row in plain.rows]
    assert [int(shown.values[row.place]) for row in kept] == [int(plain.values[row.place]) for row in plain.rows]


def parted(to: Path, make: Callable[[], nn.Module], fault: str, element: int, **how: Any) -> Difference:
    """The first difference between a run and a run with a fault in one element."""
    right = recorded(to / "right", make, **how)
    setattr(Own, fault, element)
    return difference(right, recorded(to / "wrong", make, **how))[0]


@pytest.mark.parametrize("share", [SHARE, 1])
@pytest.mark.parametrize("element", ELEMENTS)
def test_one_element_in_the_backward_of_attention(tmp_path: Path, element: int, share: float) -> None:
    """It is named with every share. Only a share of 1 shows that no layer before it differs."""
    parting = parted(tmp_path, Block, "in_backward", element, share=share)
    assert (parting.step, parting.direction, parting.row.module) == (0, "backward", "attention.qkv")
    assert parting.tensor == "gradient of output"
    assert parting.operation.startswith("the backward of attention, in its own code")
    assert parting.is_sure == (share == 1)


@pytest.mark.parametrize("element", ELEMENTS)
def test_one_element_in_the_forward_of_attention(tmp_path: Path, element: int) -> None:
    parting = parted(tmp_path, Block, "in_forward", element)
    assert (parting.direction, parting.row.module, parting.tensor) == ("forward", "attention.out", "input")
    assert parting.operation == "the forward of attention, in its own code, after the output of attention.qkv"


def own_linears() -> nn.Module:
    return nn.Sequential(SubLinear(WIDTH, WIDTH), nn.GELU(), SubLinear(WIDTH, WIDTH), nn.Tanh())


@pytest.mark.parametrize("element", ELEMENTS)
def test_one_element_in_a_subclass_of_a_layer(tmp_path: Path, element: int) -> None:
    """All before its output is read whole, so the answer is sure."""
    parting = parted(tmp_path, own_linears, "in_forward", element)
    assert (parting.direction, parting.row.module, parting.tensor) == ("forward", "0", "output")
    assert parting.operation == "the forward of 0" and parting.is_sure


@pytest.mark.parametrize("element", ELEMENTS)
def test_one_element_in_the_backward_of_a_subclass(tmp_path: Path, element: int) -> None:
    parting = parted(tmp_path, own_linears, "in_backward", element)
    assert (parting.direction, parting.row.module, parting.tensor) == ("backward", "1", "gradient of output")
    assert parting.operation == "the backward of 2"
