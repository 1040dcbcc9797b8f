"""A training that goes on from a checkpoint is compared with one that did not stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dash_attn
from dash_attn.watching.difference import common_steps, first_difference
from dash_attn.watching.files import Record, load_run
from tests.watching.small import difference

State = tuple[dict[str, Any], dict[str, Any]]


def trained(to: Path, run: range, given: State | None = None, **options: Any) -> tuple[Record, State]:
    torch.manual_seed(0)
    batches = torch.randn(6, 4, 8)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    if given is not None:
        model.load_state_dict(given[0])
        optimizer.load_state_dict(given[1])
    with dash_attn.watch(model, optimizer=optimizer, to=to, **options):
        for step in run:
            model(batches[step]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (record,) = load_run(to)
    return record, (model.state_dict(), optimizer.state_dict())


@pytest.fixture
def whole(tmp_path: Path) -> Record:
    return trained(tmp_path / "whole", range(6))[0]


def test_a_resumed_training(tmp_path: Path, whole: Record) -> None:
    first, state = trained(tmp_path / "first", range(3))
    second, _ = trained(tmp_path / "second", range(3, 6), state, first_step=3)
    assert sorted(second.steps) == [3, 4, 5]
    for part in (first, second):
        assert len(common_steps(whole, part)) == 3
        assert first_difference([whole], [part]) is None and first_difference([part], [whole]) is None


def test_steps_are_those_of_the_whole_training(tmp_path: Path) -> None:
    _, state = trained(tmp_path / "first", range(3))
    second, _ = trained(tmp_path / "second", range(3, 6), state, first_step=3, steps=range(4, 100))
    assert sorted(second.steps) == [4, 5]


def test_a_state_of_the_optimizer_that_is_not_loaded(tmp_path: Path, whole: Record) -> None:
    _, (model, state) = trained(tmp_path / "first", range(3))
    second, _ = trained(tmp_path / "second", range(3, 6), (model, {**state, "state": {}}), first_step=3)
    parting, reasons = difference(whole, second)
    assert (parting.step, parting.topic) == (3, "update")
    assert reasons[0].name == "the state of the optimizer"


def test_weights_that_are_changed_after_loading(tmp_path: Path, whole: Record) -> None:
    _, (model, state) = trained(tmp_path / "first", range(3))
    model = {**model, "weight": model["weight"] * 1.5}
    second, _ = trained(tmp_path / "second", range(3, 6), (model, state), first_step=3)
    for pair in ((whole, second), (second, whole)):
        parting, reasons = difference(*pair)
        assert (parting.step, parting.first_common, parting.topic, parting.tensor) == (3, 3, "earlier", "weight")
        assert reasons[0].name == "weights or buffers that were not loaded" and "checkpoint" in reasons[0].advice


@pytest.mark.parametrize("restored", [True, False])
def test_a_random_state_that_is_not_loaded(tmp_path: Path, restored: bool) -> None:
    """Step 3 is the first step of both records: nothing has drawn in one run and not in the other since."""

    def run(to: Path, steps: range, given: Any = None, **options: Any) -> tuple[Record, Any]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if given is not None:
            model.load_state_dict(given[0])
            if restored:
                torch.set_rng_state(given[1])
        with dash_attn.watch(model, optimizer=optimizer, to=to, **options):
            for _ in steps:
                model(torch.randn(4, 8)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return load_run(to)[0], (model.state_dict(), torch.get_rng_state())

    record, _ = run(tmp_path / "whole", range(6))
    _, state = run(tmp_path / "first", range(3))
    second, _ = run(tmp_path / "second", range(3, 6), state, first_step=3)
    if restored:
        assert first_difference([record], [second]) is None
        return
    parting, reasons = difference(record, second)
    assert (parting.step, parting.topic, parting.generators) == (3, "data", (("torch on the CPU", 3),))
    assert reasons[0].name == "a random state that was not loaded" and reasons[0].seen
    assert "checkpoint" in reasons[0].advice
    assert not {"random draws", "a seed"} & {reason.name for reason in reasons}


@pytest.mark.parametrize("number", [-1, 2**32, 1.5])
def test_a_number_of_a_step_that_is_refused(tmp_path: Path, number: Any) -> None:
    with pytest.raises(ValueError, match="first_step"):
        dash_attn.watch(nn.Linear(2, 2), to=tmp_path, first_step=number)


def test_an_option_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="first_stop"):
        dash_attn.watch(nn.Linear(2, 2), to=tmp_path, first_stop=1)  # type: ignore[call-arg]
