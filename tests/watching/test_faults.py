"""Planted faults: the first difference is named, with its step, module, tensor and direction, and a cause that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dash_attn.watching.causes import causes
from dash_attn.watching.difference import first_difference
from dash_attn.watching.files import Record
from tests.watching.small import GPT, Attention, Scatter, Shuffled, difference, same, trained


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    a, b = (trained(tmp_path / name) for name in "ab")
    assert same(a, b) and sorted(a.steps) == [0, 1, 2]


def scatter(model: GPT) -> nn.Module:
    table = Scatter(*model.token.weight.shape)
    table.load_state_dict(model.token.state_dict())
    model.token = table
    return model


def test_an_atomic_scatter(tmp_path: Path) -> None:
    runs = []
    for seed in (1, 2):
        Shuffled.generator.manual_seed(seed)
        runs.append(trained(tmp_path / str(seed), change=scatter))
    parting, reasons = difference(*runs)
    assert (parting.step, parting.direction, parting.row.module) == (0, "backward", "token")
    assert parting.tensor == "gradient of weight" and parting.operation == "the backward of token"
    assert parting.inputs == ("gradient of output of token",)
    assert "atomic additions" in [cause.name for cause in reasons]


def test_a_seed(tmp_path: Path) -> None:
    parting, reasons = difference(*(trained(tmp_path / str(seed), seed=seed) for seed in (1, 2)))
    assert (parting.step, parting.topic, parting.row.module) == (0, "weights", "token")
    assert reasons[0].name == "a seed" and reasons[0].seen and "torch" in reasons[0].evidence


def test_a_seed_that_only_dropout_uses(tmp_path: Path) -> None:
    def reseed(step: int, tokens: Tensor) -> Tensor:
        if step == 1:
            torch.manual_seed(77)
        return tokens

    parting, reasons = difference(trained(tmp_path / "a"), trained(tmp_path / "b", each=reseed))
    assert (parting.step, parting.direction, parting.row.module) == (1, "forward", "blocks.0.mlp.2")
    assert parting.operation == "the forward of blocks.0.mlp.2" and parting.inputs == ("input of blocks.0.mlp.2",)
    assert reasons[0].name == "random draws" and reasons[0].seen


def test_a_differing_batch(tmp_path: Path) -> None:
    def swap(step: int, tokens: Tensor) -> Tensor:
        return tokens.flip(0) if step == 2 else tokens

    parting, reasons = difference(trained(tmp_path / "a"), trained(tmp_path / "b", each=swap))
    assert (parting.step, parting.topic, parting.tensor, parting.steps_equal) == (2, "data", "input", 2)
    assert "the order of samples" in [cause.name for cause in reasons] and not parting.generators


def test_another_shape_of_a_batch(tmp_path: Path) -> None:
    parting, reasons = difference(
        trained(tmp_path / "a"), trained(tmp_path / "b", each=lambda step, tokens: tokens[:, : 12 + step])
    )
    assert (parting.step, parting.form, parting.other_form) == (0, "int64 [4, 16]", "int64 [4, 11]")
    assert reasons[0].name == "padding or packing" and reasons[0].seen


class Wrong(torch.autograd.Function):
    """The identity, whose backward changes one bit in one run."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        changed = gradient.contiguous().clone()
        changed.view(-1)[3] *= Wrong.factor
        return changed


class WrongAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).transpose(1, 3).unbind(2)
        return self.proj(self.attend(Wrong.apply(q), k, v).transpose(1, 2).flatten(2))


def test_code_between_modules(tmp_path: Path) -> None:
    """Attention is no module of its own: the code of the module that calls it is named, in the backward."""

    def change(model: GPT) -> nn.Module:
        attention = WrongAttention()
        attention.load_state_dict(model.blocks[1].attn.state_dict())
        model.blocks[1].attn = attention
        return model

    runs = []
    for factor in (1.0, 1.0 + 2**-20):
        Wrong.factor = factor
        runs.append(trained(tmp_path / str(factor), change=change))
    parting, reasons = difference(*runs)
    assert (parting.step, parting.direction, parting.row.module) == (0, "backward", "blocks.1.attn.qkv")
    assert parting.tensor == "gradient of output"
    assert parting.operation.startswith("the backward of blocks.1.attn, in its own code")
    assert "blocks.1.attn.proj" in parting.operation
    assert "attention in any order" in [cause.name for cause in reasons]


def test_code_between_modules_in_the_forward(tmp_path: Path) -> None:
    def change(factor: float) -> Any:
        def changed(model: GPT) -> nn.Module:
            model.blocks[0].attn.attend = lambda q, k, v: v * factor
            return model

        return changed

    parting, _ = difference(*(trained(tmp_path / str(f), change=change(f)) for f in (1.0, 1.5)))
    assert (parting.direction, parting.row.module, parting.tensor) == ("forward", "blocks.0.attn.proj", "input")
    assert parting.operation == ("the forward of blocks.0.attn, in its own code, after the output of blocks.0.attn.qkv")


def test_the_loss(tmp_path: Path) -> None:
    """What follows the output of the model is no module: the script is named."""
    parting, _ = difference(
        trained(tmp_path / "a"),
        trained(tmp_path / "b", each=lambda step, tokens: torch.cat([tokens[:, :-1], tokens[:, :1]], 1)),
    )
    assert (parting.direction, parting.row.module, parting.tensor) == ("backward", "head", "gradient of output")
    assert parting.operation.startswith("the loss")


def test_another_model(tmp_path: Path) -> None:
    def shorter(model: GPT) -> nn.Module:
        model.blocks = model.blocks[:1]
        return model

    parting, reasons = difference(trained(tmp_path / "a"), trained(tmp_path / "b", change=shorter))
    assert parting.topic == "structure" and parting.row.module.startswith("blocks.1")
    assert reasons[0].name == "another path through the model"


def test_the_process_that_parts_first(tmp_path: Path) -> None:
    """Two processes differ in the forward of one step: the earlier tensor counts, not the lower rank."""
    a = trained(tmp_path, 1)

    def changed(index: int) -> Record:
        values = a.steps[0].values.copy()
        values[a.steps[0].rows[index].place] += 1
        return replace(a, steps={0: replace(a.steps[0], values=values)})

    forward = [i for i, row in enumerate(a.steps[0].rows) if row.phase == "forward" and row.tensor == "output"]
    parting = first_difference([a, replace(a, rank=1)], [changed(forward[5]), changed(forward[2])])
    assert parting is not None
    assert (parting.rank, parting.index) == (1, forward[2])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("threads", (1, 4)),
        ("float32 precision of cuda matmul", ("ieee", "tf32")),
        ("float32 precision of cuda rnn", ("tf32", "ieee")),
        ("float32 precision of mkldnn conv", ("ieee", "bf16")),
        ("compiled", (False, True)),
        ("NCCL_ALGO", (None, "Ring")),
        ("CUBLAS_WORKSPACE_CONFIG", (":4096:8", None)),
        ("torch", ("2.9", "2.13")),
    ],
)
def test_settings_that_differ_come_first(tmp_path: Path, name: str, values: tuple[Any, Any]) -> None:
    Shuffled.generator.manual_seed(1)
    a, b = (trained(tmp_path / each, 1, change=scatter) for each in "ab")
    parting, _ = difference(a, b)
    environments = []
    for value, record in zip(values, (a, b), strict=True):
        variables = {name: value} if name.isupper() and value is not None else {}
        facts = {**record.environment, "variables": variables}
        environments.append(facts if name.isupper() else {**facts, name: value})
    first = causes(parting, *environments)[0]
    assert (first.name, first.seen) == (name, True)
    assert name not in [cause.name for cause in causes(parting, environments[0], environments[0])]
