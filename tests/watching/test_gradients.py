"""Gradients that no backward of the watcher saw: parameters that are trained later, gradients that the script sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dash_attn
from dash_attn.watching.causes import causes
from dash_attn.watching.difference import Difference, first_difference
from dash_attn.watching.files import Record, load_run
from tests.watching.small import Scatter, Shuffled

Backward = Callable[[nn.Module, Tensor], None]


def backward(model: nn.Module, loss: Tensor) -> None:
    loss.backward()


def set_by_the_script(model: nn.Module, loss: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def trained(to: Path, seed: int, run: Backward = backward, frozen: bool = False) -> Record:
    """Two steps of a model with a planted fault: the backward of module 0. It may be frozen in step 0."""
    Shuffled.generator.manual_seed(seed)
    torch.manual_seed(0)
    model = nn.Sequential(Scatter(20, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 20))
    model[0].weight.requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(model.parameters())
    with dash_attn.watch(model, optimizer=optimizer, to=to):
        for _ in range(2):
            tokens = torch.randint(20, (400,))
            run(model, F.cross_entropy(model(tokens), tokens.roll(1)))
            optimizer.step()
            optimizer.zero_grad()
            model[0].weight.requires_grad_(True)
    (record,) = load_run(to)
    return record


def first(a: Record, b: Record) -> Difference:
    parting = first_difference([a], [b])
    assert parting is not None
    return parting


def test_a_parameter_that_is_trained_later(tmp_path: Path) -> None:
    parting = first(*(trained(tmp_path / str(seed), seed, frozen=True) for seed in (1, 2)))
    assert (parting.step, parting.topic, parting.operation) == (1, "backward", "the backward of 0")
    assert parting.inputs == ("gradient of output of 0",)


def test_a_gradient_that_the_script_sets(tmp_path: Path) -> None:
    a, b = (trained(tmp_path / str(seed), seed, set_by_the_script) for seed in (1, 2))
    parting = first(a, b)
    assert (parting.step, parting.topic, parting.tensor) == (0, "gradient", "gradient of weight")
    assert parting.direction == "backward, or what follows it"
    assert parting.operation == "the backward of 0, or what changes the gradient of weight of 0 after it"
    assert parting.inputs == ("gradient of output of 0",)
    names = [cause.name for cause in causes(parting, a.environment, b.environment)]
    assert {"atomic additions", "clipping or scaling"} <= set(names)


def test_a_gradient_that_changes_after_its_backward(tmp_path: Path) -> None:
    def clipped(model: nn.Module, loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    parting = first(trained(tmp_path / "a", 1), trained(tmp_path / "b", 1, clipped))
    assert (parting.topic, parting.direction) == ("reduce", "between backward and update")
    assert parting.operation == "what changes the gradient of weight of 0 between backward and update"


def test_a_backward_after_one_that_ended_in_an_error(tmp_path: Path) -> None:
    """There is no forward between the two."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = [ValueError()]

    def stop(gradient: Tensor) -> None:
        if errors:
            raise errors.pop()

    with dash_attn.watch(model, optimizer=optimizer, to=tmp_path):
        hidden = model[0](torch.ones(4, 8))
        hidden.register_hook(stop)
        loss = model[1](hidden).sum()
        with pytest.raises(ValueError):
            loss.backward(retain_graph=True)
        assert model[1].weight.grad is not None and model[0].weight.grad is None
        loss.backward()
        optimizer.step()
    (record,) = load_run(tmp_path)
    gradients = [f"{row.module}.{row.tensor}" for row in record.steps[0].rows if row.phase == "backward"]
    parameters = [name for name, _ in model.named_parameters()]
    assert sorted(name for name in gradients if name in parameters) == sorted(parameters)
