"""Optimizers that are replaced, and those that `watch` does not know."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dash_attn
from dash_attn.watching.difference import settings_of
from dash_attn.watching.files import Record, load_run
from dash_attn.watching.watcher import Watcher

UNKNOWN = "an optimizer that it does not know"


def trained(to: Path, replaced: Callable[[Watcher, Optimizer], Any], steps: int = 6) -> tuple[Record, list[str]]:
    """The record of a run whose optimizer is replaced in the middle, and the warnings of `watch`."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with dash_attn.watch(model, optimizer=optimizer, to=to) as watcher:
            for step in range(steps):
                if step == 3:
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                    replaced(watcher, optimizer)
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    (record,) = load_run(to)
    return record, [str(each.message) for each in told if "dash_attn.watch" in str(each.message)]


def test_a_replaced_optimizer_is_told_once(tmp_path: Path) -> None:
    record, told = trained(tmp_path, lambda watcher, optimizer: None)
    assert len(told) == 1 and UNKNOWN in told[0] and "add_optimizer" in told[0]
    assert sorted(record.steps) == [0, 1, 2, 3]


@pytest.mark.filterwarnings("error")
def test_a_replaced_optimizer_if_warnings_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hint goes to standard error. Record and training continue."""
    model = nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with dash_attn.watch(model, optimizer=optimizers[0], to=tmp_path):
        for optimizer in (optimizers[0], optimizers[1], optimizers[1], optimizers[0], optimizers[0]):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sorted(load_run(tmp_path)[0].steps) == [0, 1, 2]
    err = capsys.readouterr().err
    assert err.count(UNKNOWN) == 1 and err.count("\n") == 1


def test_a_replaced_optimizer_after_a_step_that_ended_in_an_error(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))

    def fail() -> float:
        raise ValueError

    with dash_attn.watch(model, optimizer=first, to=tmp_path):
        with pytest.raises(ValueError):
            first.step(fail)
        model(torch.ones(4, 8)).sum().backward()
        with pytest.warns(UserWarning, match=UNKNOWN):
            second.step()


def test_a_replaced_optimizer_that_is_given(tmp_path: Path) -> None:
    record, told = trained(tmp_path, lambda watcher, optimizer: watcher.add_optimizer(optimizer))
    assert not told and sorted(record.steps) == [0, 1, 2, 3, 4, 5]
    name = "lr of param group 0 of optimizer 1"
    assert settings_of(record, 3)[name] == settings_of(record, 5)[name] and name not in settings_of(record, 2)


class Outer(Optimizer):
    """An optimizer whose step is that of another one, as in torch's ZeroRedundancyOptimizer."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        self.inner.step()


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("closes", [True, False])
def test_an_optimizer_inside_another(
    tmp_path: Path, inner: bool, closes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(8, 8)
    optimizer = Outer(list(model.parameters()))
    given = optimizer.inner if inner else optimizer

    def closure() -> None:
        model(torch.ones(4, 8)).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dash_attn.watch(model, optimizer=given, to=tmp_path):
            for _ in range(3):
                if closes:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
    assert sorted(load_run(tmp_path)[0].steps) == [0, 1, 2] and not capsys.readouterr().err


def test_optimizers_of_other_models_and_of_no_watcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [nn.Linear(8, 8) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = dash_attn.watch(models[0], optimizer=optimizers[0], to=tmp_path / "a")
        none = dash_attn.watch(models[1], to=tmp_path / "b")
        for _ in range(2):
            models[1](models[0](torch.ones(4, 8))).sum().backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
        one.close()
        none.close()
        models[0](torch.ones(4, 8)).sum().backward()
        torch.optim.SGD(models[0].parameters(), lr=0.1).step()
    assert not capsys.readouterr().err
