"""Large tensors that layers compute are read in part, and `diff` says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dash_attn
from dash_attn.watching.difference import first_difference
from dash_attn.watching.files import Record, Step, load_run
from dash_attn.watching.fingerprint import Share, fingerprint
from tests.watching.small import difference
from tests.watching.test_watcher import value


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_share_of_large_activations(tmp_path: Path) -> None:
    """Outputs of 1 MiB and their gradients are read in part, another part in every step. All else is read whole."""
    model = nn.Sequential(nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, weights = torch.randn(512, 512), [model[1].weight.detach().clone()]
    outputs, gradients = list[Tensor](), list[Tensor]()
    with dash_attn.watch(model, optimizer=optimizer, to=tmp_path, share=1 / 4) as watcher:
        for _ in range(4):
            watcher.see("the batch", x)
            outputs.append(model(x).detach())
            model(x[:3]).sum().backward()
            gradients.append(model[1].weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
            weights.append(model[1].weight.detach().clone())
    (record,) = load_run(tmp_path)
    assert record.share == "1/4"
    for number, step in record.steps.items():
        share = Share.of_step(4, number)
        rows = {(row.phase, row.module, row.tensor): row for row in reversed(step.rows)}  # the first of each name

        def read(*key: str, rows: Any = rows, step: Step = step) -> tuple[str, int]:
            return step.form(rows[key]), int(step.values[rows[key].place])

        part, whole = "float32 [512, 512], 1/4 read", "float32 [512, 512]"
        assert read("data", "", "the batch") == (whole, fingerprint(x))
        assert read("data", "", "input") == read("forward", "0", "input") == read("data", "", "the batch")
        assert read("forward", "0", "output") == read("forward", "1", "input") == (part, fingerprint(x.tanh(), share))
        assert read("forward", "", "output") == (part, fingerprint(outputs[number], share))
        assert read("backward", "1", "weight") == (whole, fingerprint(gradients[number]))
        assert read("reduce", "1", "gradient of weight") == read("backward", "1", "weight")
        assert read("update", "1", "weight") == (whole, fingerprint(weights[number + 1]))
        assert read("update", "1", "momentum_buffer of weight")[0] == whole
        assert read("backward", "1", "output")[0] == "float32 [3, 512]"
        assert not step.is_whole(rows["forward", "0", "output"]) and step.is_whole(rows["data", "", "the batch"])
    assert len({Share.of_step(4, number) for number in record.steps}) == 4


def test_gradients_of_large_activations(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Tanh(), nn.Tanh()), torch.randn(512, 512, requires_grad=True)
    factors = torch.randn(512, 512)
    with dash_attn.watch(model, to=tmp_path, share=1 / 2):
        middle = model[0](x)
        middle.retain_grad()
        (model[1](middle) * factors).sum().backward()
    step, gradient = load_run(tmp_path)[0].steps[0], middle.grad
    assert gradient is not None
    assert value(step, "backward", "0:output") == fingerprint(gradient, Share.of_step(2, 0)) != fingerprint(gradient)
    assert value(step, "backward", "1:output") == fingerprint(factors)  # no layer has made it


def test_whole_tensors(tmp_path: Path) -> None:
    """With share=1 fingerprints are those of whole tensors, and a tensor that `see` has read is not read again."""
    x = torch.randn(512, 512)
    model = Doubles()
    with dash_attn.watch(model, to=tmp_path, share=1) as watcher:
        watcher.see("x", x)
        model(x)
    (record,) = load_run(tmp_path)
    assert record.share == "1" and value(record.steps[0], "forward", ":output") == fingerprint(x * 2)
    assert len({row.place for row in record.steps[0].rows if row.phase == "data"}) == 1


def test_a_difference_outside_the_share(tmp_path: Path) -> None:
    """A piece that differs in every step is found in one of four steps, and what is said about it is not sure."""

    def run(name: str, changed: int | None, share: float) -> Record:
        model, x = nn.Tanh(), torch.zeros(512, 512)
        if changed is not None:  # called before the hook that records the output
            model.register_forward_hook(lambda module, args, out: out.view(-1)[changed].fill_(1) and None)
        with dash_attn.watch(model, to=tmp_path / name, share=share) as watcher:
            for _ in range(4):
                model(x)
                watcher.end_step()
        return load_run(tmp_path / name)[0]

    parts, whole = run("a", None, 1 / 4), run("a whole", None, 1)
    steps = set()
    for number in range(6):
        parting, _ = difference(parts, run(f"b{number}", 128 * number + 3, 1 / 4))
        steps.add(parting.step)
        assert (parting.row.tensor, parting.topic) == ("output", "forward")
        parting, _ = difference(whole, run(f"c{number}", 128 * number + 3, 1))
        assert (parting.step, parting.is_sure) == (0, True)
    assert len(steps) > 1
    with pytest.raises(ValueError, match=r"different shares of large tensors are read \(1/4 and 1\)"):
        first_difference([parts], [whole])


def test_a_difference_after_tensors_that_were_read_in_part(tmp_path: Path) -> None:
    def run(name: str, factor: float) -> Record:
        torch.manual_seed(0)
        model, head = nn.Sequential(nn.Tanh(), nn.Linear(512, 2)), torch.ones(512, 2)
        with dash_attn.watch(model, to=tmp_path / name) as watcher:
            for step in range(3):
                model(torch.randn(512, 512))
                watcher.see("head", head * factor if step == 2 else head)
                watcher.end_step()
        return load_run(tmp_path / name)[0]

    parting, _ = difference(run("a", 1), run("b", 2))
    assert (parting.step, parting.row.tensor, parting.share, parting.is_sure) == (2, "head", "1/16", False)
    assert parting.to_be_sure == range(1, 3)


@pytest.mark.parametrize("share", [0, -1, 2, 0.3, 0.9, 1 / 5000])
def test_a_share_is_one_of_n(tmp_path: Path, share: float) -> None:
    with pytest.raises(ValueError, match="give 1, or 1 / n for a whole number n"):
        dash_attn.watch(nn.Linear(2, 2), to=tmp_path, share=share)
    dash_attn.watch(nn.Linear(2, 2), to=tmp_path, share=0.333333).close()
