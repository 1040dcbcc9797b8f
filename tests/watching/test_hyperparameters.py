"""Learning rates, betas and schedules are inputs of the update: a run that has others is told so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import dash_attn
from dash_attn.tools.cli.watch import compared, tell
from dash_attn.watching.difference import first_difference
from dash_attn.watching.files import Record, load_run
from tests.watching.small import difference

NAME = "another learning rate, betas or schedule"
Make = Callable[[nn.Module], Optimizer]


def sgd(**options: Any) -> Make:
    return lambda model: torch.optim.SGD(model.parameters(), **options)


def adam(**options: Any) -> Make:
    return lambda model: torch.optim.Adam(model.parameters(), **options)


def groups(*rates: float) -> Make:
    return lambda model: torch.optim.SGD(
        [{"params": list(part.parameters()), "lr": r} for part, r in zip(model, rates, strict=True)]
    )


def with_others(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        group["momentum"] = 0.5
    return optimizer


def trained(to: Path, make: Make, schedule: Callable[[int], float] = lambda step: 1.0, **options: Any) -> Record:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = make(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    with dash_attn.watch(model, optimizer=optimizer, to=to, **options):
        for step in range(3):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step)
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (record,) = load_run(to)
    return record


@pytest.mark.parametrize(
    ("one", "other", "step", "told"),
    [
        (sgd(lr=0.1), sgd(lr=0.05), 0, "lr of param group 0: 0.1 and 0.05"),
        (sgd(lr=0.1), sgd(lr=0.1, weight_decay=0.01), 0, "weight_decay of param group 0: 0 and 0.01"),
        (sgd(lr=0.1, momentum=0.9), sgd(lr=0.1, momentum=0.5), 1, "momentum of param group 0: 0.9 and 0.5"),
        (adam(), adam(betas=(0.9, 0.99)), 0, "betas[1] of param group 0: 0.999 and 0.99"),
        (groups(0.1, 0.2), groups(0.1, 0.3), 0, "lr of param group 1: 0.2 and 0.3"),
        (sgd(lr=torch.tensor(0.1)), sgd(lr=torch.tensor(0.2)), 0, "lr of param group 0: not equal"),
        (sgd(lr=0.1), sgd(lr=torch.tensor(0.2)), 0, "lr of param group 0: 0.1 and a tensor"),
    ],
)
def test_other_arguments_of_the_optimizer(tmp_path: Path, one: Make, other: Make, step: int, told: str) -> None:
    parting, reasons = difference(trained(tmp_path / "a", one), trained(tmp_path / "b", other))
    assert (parting.step, parting.topic, parting.settings) == (step, "update", (told,))
    assert (reasons[0].name, reasons[0].evidence, reasons[0].seen) == (NAME, "1 setting differs", True)


def test_another_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "a", sgd(lr=0.1))
    trained(tmp_path / "b", sgd(lr=0.1), lambda step: 0.5 if step == 1 else 1.0)
    tell(compared(tmp_path / "a", tmp_path / "b"))
    out = capsys.readouterr().out
    assert "The first difference is in step 1." in out and "direction         update" in out
    assert "its settings      differ: lr of param group 0: 0.1 and 0.05\n" in out and out.count("0.05") == 1
    assert "the operation itself differs" not in out and f"! {NAME}" in out


def test_many_settings_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report names three. `--json` has all of them."""
    trained(tmp_path / "a", groups(0.1, 0.2))
    trained(tmp_path / "b", lambda model: with_others(groups(0.3, 0.4)(model)))
    runs = compared(tmp_path / "a", tmp_path / "b")
    tell(runs)
    out = capsys.readouterr().out
    first = "lr of param group 0: 0.1 and 0.3, momentum of param group 0: 0 and 0.5, lr of param group 1: 0.2 and 0.4"
    assert f"its settings      differ: {first}, and 1 more\n" in out and "4 settings differ\n" in out
    last = "momentum of param group 1: 0 and 0.5"
    assert runs.facts()["settings"] == [*first.split(", "), last] and last not in out


def test_a_setting_that_changes_nothing_is_no_difference(tmp_path: Path) -> None:
    """Arguments that give the same bits may differ."""
    a, b = trained(tmp_path / "a", sgd(lr=0.1)), trained(tmp_path / "b", sgd(lr=0.1, foreach=False))
    assert first_difference([a], [b]) is None


def test_the_same_arguments(tmp_path: Path) -> None:
    """They are no cause of a difference of another kind."""
    a = trained(tmp_path / "a", sgd(lr=0.1))
    b = trained(tmp_path / "b", sgd(lr=0.1), steps=range(1))
    values = a.steps[0].values.copy()
    (index,) = (i for i, row in enumerate(a.steps[0].rows) if row[:3] == ("update", "0", "weight"))
    values[a.steps[0].rows[index].place] += 1
    b.steps[0] = type(a.steps[0])(0, a.steps[0].rows, a.steps[0].forms, values)
    parting, reasons = difference(a, b)
    assert parting.topic == "update" and not parting.settings
    assert NAME not in [reason.name for reason in reasons]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [10**400, -(10**400), 2**1024, 2**1024 - 1])
def test_a_number_beyond_all_floats_is_left_out(
    tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(model: nn.Module) -> Optimizer:
        return torch.optim.SGD([{"params": list(model.parameters()), "most": number, "more": 2**1000}], lr=0.1)

    record = trained(tmp_path, make)
    assert sorted(record.steps) == [0, 1, 2] and not capsys.readouterr().err
    names = {row.tensor for row in record.steps[0].rows if row.phase == "setting"}
    assert {"lr of param group 0", "more of param group 0"} <= names and "most of param group 0" not in names
