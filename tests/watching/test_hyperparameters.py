"""Learning rates, betas and schedules are inputs of the update: a run that has others is told so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import dash_attn
from dash_attn.tools.cli.watch import compared, tell
from dash_attn.watching.difference import first_difference, settings_of
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


def written(record: Record) -> list[set[str]]:
    """The settings that each step of a record has."""
    return [{row.tensor for row in step.rows if row.phase == "setting"} for step in record.steps.values()]


def test_settings_are_written_when_they_change(tmp_path: Path) -> None:
    """They are known in every step."""
    same = trained(tmp_path / "a", groups(0.1, 0.2))
    assert {"lr of param group 0", "momentum of param group 1"} <= written(same)[0] and not any(written(same)[1:])
    others = trained(tmp_path / "b", groups(0.1, 0.2), lambda step: 0.5 if step else 1.0)
    assert written(others)[1:] == [{"lr of param group 0", "lr of param group 1"}, set()]
    rates = [settings_of(others, step)["lr of param group 1"][0] for step in range(3)]
    assert rates == ["0.2", "0.1", "0.1"] and settings_of(same, 2) == settings_of(same, 0)


@pytest.mark.filterwarnings("error")
def test_values_of_param_groups_of_all_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    group.update(pair=[1.0, 2.0], number=0.5, names=["a", "b"])
    with dash_attn.watch(model, optimizer=optimizer, to=tmp_path):
        for step in range(4):
            group["pair"][1] += step == 1
            group["number"] = torch.tensor([0.5, step]) if step in (1, 2) else 0.5
            group["array"], group["mixed"] = np.ones(3), [np.ones(3), 1.0]
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    (record,) = load_run(tmp_path)
    assert not capsys.readouterr().err and len(record.steps) == 4
    pair, number = {"pair[0] of param group 0", "pair[1] of param group 0"}, {"number of param group 0"}
    assert written(record)[1:] == [pair | number, number, number]
    assert [settings_of(record, step)["pair[1] of param group 0"][0] for step in range(4)] == ["2", "3", "3", "3"]
    told = [settings_of(record, step)["number of param group 0"][0] for step in range(4)]
    assert told == ["0.5", "a tensor", "a tensor", "0.5"]


def test_many_param_groups_take_little_space(tmp_path: Path) -> None:
    def size(to: Path, count: int, groups: bool) -> int:
        model = nn.ParameterList(torch.ones(2) for _ in range(100))
        given = [{"params": [parameter]} for parameter in model] if groups else list(model)
        optimizer = torch.optim.AdamW(given)
        with dash_attn.watch(model, optimizer=optimizer, to=to):
            for _ in range(count):
                torch.stack(list(model)).sum().backward()
                optimizer.step()
        return (to / "rank0.watch").stat().st_size

    one, many = (size(tmp_path / f"{g}5", 5, g) - size(tmp_path / f"{g}3", 3, g) for g in (False, True))
    assert many == one


@pytest.mark.parametrize("resumed", [True, False])
def test_a_run_that_ended_in_an_update(tmp_path: Path, resumed: bool) -> None:
    """The step of a resumed run has all weights and settings. That of the run from the start does not."""

    def run(to: Path, steps: range, stops: bool) -> Record:
        torch.manual_seed(0)
        batches, model = torch.randn(3, 4, 8), nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> float:
            if watches and stops and step == 1:
                raise ValueError
            return 0.0

        watcher = None
        for step in range(3):
            watches = step in steps
            if watches and watcher is None:
                watcher = dash_attn.watch(model, optimizer=optimizer, to=to, first_step=step)
            model(batches[step]).square().sum().backward()
            try:
                optimizer.step(closure)
            except ValueError:
                break
            optimizer.zero_grad()
        assert watcher is not None
        watcher.close()
        return load_run(to)[0]

    begins = (0, 1) if resumed else (1, 0)
    full, cut = run(tmp_path / "a", range(begins[0], 3), False), run(tmp_path / "b", range(begins[1], 3), True)
    assert max(cut.steps) == 1
    assert not [row for row in cut.steps[1].rows if row.phase == "update"]
    with_settings = [any(row.phase == "setting" for row in each.steps[1].rows) for each in (full, cut)]
    assert with_settings == [not resumed, resumed]
    assert first_difference([full], [cut]) is None and first_difference([cut], [full]) is None
