"""What scripts do around their modules: the answer names it, and not a module or the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn.watching.difference import Difference, first_difference
from dash_attn.watching.files import Record, Step, load_run
from dash_attn.watching.fingerprint import fingerprint

Run = Callable[[Path, int], None]


def x() -> Tensor:
    return torch.randn(4, 8)


def first(folder: Path, run: Run) -> Difference:
    """The first difference of two runs, whichever of them is named first."""
    records = []
    for number in (0, 1):
        torch.manual_seed(0)
        run(folder / str(number), number)
        records.append(load_run(folder / str(number)))
    one, other = first_difference(*records), first_difference(*reversed(records))
    assert one is not None and other is not None
    assert (one.step, one.row[:3], one.operation) == (other.step, other.row[:3], other.operation)
    return one


def rows(step: Step, phase: str) -> list[str]:
    return [f"{row.module}:{row.tensor}" for row in step.rows if row.phase == phase]


class WrongProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x * ctx.factor, None


def test_tied_weights(tmp_path: Path) -> None:
    """The gradient of a weight of two modules is the sum of theirs: either may be the one that differs."""

    class Head(nn.Linear):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return WrongProduct.apply(x, self.weight, self.factor)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.mid, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), Head(8, 10, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.mid(self.emb(x)))

    def run(to: Path, number: int) -> None:
        model = Tied()
        model.head.factor = 1 + number * 1e-3
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dash_attn.watch(model, optimizer=optimizer, to=to):
            model(torch.arange(5)).square().sum().backward()
            optimizer.step()

    parting = first(tmp_path, run)
    assert parting.tensor == "gradient of weight" and parting.operation == "the backward of emb or head"
    assert set(parting.inputs) == {"gradient of output of emb", "gradient of output of head"}


@pytest.mark.parametrize("share", [1, 1 / 16])
def test_gradients_are_those_that_the_optimizer_gets(tmp_path: Path, share: float) -> None:
    """Neither `GradScaler` nor `.data` raises the version of a tensor."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    taken = list[int]()
    optimizer.register_step_pre_hook(lambda *_: taken.append(fingerprint(model.weight.grad)))
    with dash_attn.watch(model, optimizer=optimizer, to=tmp_path, share=share):
        scaler.scale(model(x()).sum()).backward()
        scaler.unscale_(optimizer)
        model.weight.grad.data.clamp_(-1, 1)
        scaler.step(optimizer)
    step = load_run(tmp_path)[0].steps[0]
    (row,) = (row for row in step.rows if row.phase == "reduce" and row.tensor == "gradient of weight")
    assert [int(step.values[row.place])] == taken


def test_weights_that_an_optimizer_changes_without_a_version(tmp_path: Path) -> None:
    class Plain(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad.data, alpha=0.1)

    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))  # its parameters pass modules
    optimizer = Plain(model.parameters(), lr=0.1)
    with dash_attn.watch(model, optimizer=optimizer, to=tmp_path, share=1):
        model(x()).sum().backward()
        optimizer.step()
    step = load_run(tmp_path)[0].steps[0]
    module = "parametrizations.weight"
    (row,) = (row for row in step.rows if row[:3] == ("update", module, "original1"))
    assert int(step.values[row.place]) == fingerprint(model.parametrizations.weight.original1)


def test_weights_changed_between_two_steps(tmp_path: Path) -> None:
    def run(to: Path, number: int, always: bool) -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dash_attn.watch(model, optimizer=optimizer, to=to):
            for step in range(3):
                model(x()).square().sum().backward()
                optimizer.step()
                if step == 1 and (number or always):
                    with torch.no_grad():
                        model.weight.mul_(1 + number * 1e-3)

    both = first(tmp_path / "both", lambda to, number: run(to, number, True))
    assert (both.step, both.topic, both.tensor) == (2, "between", "weight")
    assert both.direction == "before the forward"
    assert both.operation == "what changes weight of the model between two steps"
    one = first(tmp_path / "one", lambda to, number: run(to, number, False))
    assert (one.step, one.topic, one.tensor) == (2, "between", "weight")
    assert one.operation == "what changes weight of the model between two steps: only one run writes to it"


def test_weights_without_an_optimizer(tmp_path: Path) -> None:
    def run(to: Path, number: int) -> None:
        model = nn.Linear(8, 8)
        with dash_attn.watch(model, to=to):
            for _ in range(2):
                model(x()).square().sum().backward()
                with torch.no_grad():
                    model.weight -= (0.1 + number) * model.weight.grad

    parting = first(tmp_path, run)
    assert (parting.step, parting.operation) == (1, "what changes weight of the model between two steps")


def test_weights_of_steps_that_are_not_recorded(tmp_path: Path) -> None:
    def run(to: Path, number: int) -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + number)
        with dash_attn.watch(model, optimizer=optimizer, to=to, steps=range(2, 4)):
            for _ in range(4):
                model(x()).square().sum().backward()
                optimizer.step()

    parting = first(tmp_path, run)
    assert (parting.step, parting.topic) == (2, "earlier")
    assert parting.operation == "an operation of a step before, which is not recorded"


def test_some_steps_of_one_run(tmp_path: Path) -> None:
    """One record has the weights at the start of its first step, and the other one after the step before."""

    def run(to: Path, steps: range, rate: float = 0.1) -> list[Record]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with dash_attn.watch(model, optimizer=optimizer, to=to, steps=steps):
            for _ in range(4):
                model(x()).square().sum().backward()
                optimizer.step()
        return load_run(to)

    whole, part = run(tmp_path / "a", range(4)), run(tmp_path / "b", range(2, 4))
    assert first_difference(whole, part) is None and first_difference(part, whole) is None
    parting = first_difference(whole, run(tmp_path / "c", range(2, 4), rate=0.2))
    assert parting is not None and (parting.step, parting.topic, parting.tensor) == (2, "earlier", "weight")


def test_buffers(tmp_path: Path) -> None:
    """A forward writes to them, not the optimizer."""

    def run(to: Path, number: int) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model[1].momentum = 0.1 + 0.1 * number
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dash_attn.watch(model, optimizer=optimizer, to=to):
            model(x()).square().sum().backward()
            optimizer.step()

    parting = first(tmp_path, run)
    assert (parting.row.module, parting.tensor, parting.direction) == ("1", "running_mean", "forward")
    assert parting.operation == "the forward of 1, which writes to running_mean" and parting.inputs == ("input of 1",)


def test_a_module_that_one_run_calls(tmp_path: Path) -> None:
    class Maybe(nn.Module):
        def __init__(self, more: int) -> None:
            super().__init__()
            self.a, self.more, self.b, self.calls = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), more

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(self.more(h) if self.calls else h)

    def run(to: Path, number: int) -> None:
        model = Maybe(number)
        with dash_attn.watch(model, to=to):
            model(x()).square().sum().backward()

    parting = first(tmp_path, run)
    assert (parting.topic, parting.row.module, parting.tensor) == ("structure", "more", "input")


def test_code_of_the_script_between_modules(tmp_path: Path) -> None:
    def run(to: Path, number: int) -> None:
        model = nn.ModuleDict({"enc": nn.Linear(8, 8), "dec": nn.Linear(8, 8)})
        with dash_attn.watch(model, to=to):
            hidden = model["enc"](x()) * (1 + number * 1e-3)
            model["dec"](hidden).square().sum().backward()

    parting = first(tmp_path, run)
    assert (parting.topic, parting.direction, parting.row.module) == ("forward", "forward", "dec")
    assert parting.operation == "the script, between modules, after the output of enc"


def test_the_loss_after_code_of_the_script(tmp_path: Path) -> None:
    def run(to: Path, number: int) -> None:
        model = nn.ModuleDict({"enc": nn.Linear(8, 8), "dec": nn.Linear(8, 8)})
        with dash_attn.watch(model, to=to):
            (model["dec"](model["enc"](x()) * 2).square() * (1 + number * 1e-3)).sum().backward()

    parting = first(tmp_path, run)
    assert parting.row.module == "dec" and parting.operation.startswith("the loss")


class Stops(nn.Module):
    """Raises in its third forward, after its first part."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.a, self.b, self.error, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), error, 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return self.b(hidden)


def hooked() -> nn.Module:
    """A hook of the script raises in the third forward, before the hooks of the watcher."""
    model, calls = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), list[int]()

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError

    model[0].register_forward_pre_hook(hook)
    return model


@pytest.mark.parametrize("made", [lambda: Stops(ValueError), lambda: Stops(KeyboardInterrupt), hooked])
@pytest.mark.parametrize("optimized", [True, False])
def test_a_forward_that_was_interrupted(tmp_path: Path, made: Callable[[], nn.Module], optimized: bool) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dash_attn.watch(model, optimizer=optimizer if optimized else None, to=tmp_path):
        for _ in range(5):
            with suppress(ValueError, KeyboardInterrupt):
                model(x()).sum().backward()
                optimizer.step()
                with torch.no_grad():
                    model(x())
    steps = load_run(tmp_path)[0].steps
    assert sorted(steps) == [0, 1, 2, 3]
    assert all(rows(steps[number], "data") == [":input"] for number in (2, 3))
    assert all("0:input" in rows(step, "forward") or "a:input" in rows(step, "forward") for step in steps.values())


class Nested(nn.Module):
    """Its forward calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        inner = self.first(x)
        return self.last(self(inner, times - 1) if times else inner)


def test_a_model_that_calls_itself(tmp_path: Path) -> None:
    """Only the outermost call gets data, and nothing inside it comes from the script."""
    model = Nested()
    watcher = dash_attn.watch(model, to=tmp_path)
    model(torch.ones(2, 4)).sum().backward()
    watcher.close()
    (record,) = load_run(tmp_path)
    (step,) = record.steps.values()
    phases = [row.phase for row in step.rows]
    assert "script" not in phases and phases.count("data") == 1


def test_an_evaluation_between_forward_and_backward(tmp_path: Path) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, x, use_reentrant=False)

    def run(to: Path, evaluates: bool) -> Record:
        torch.manual_seed(0)
        model = Again()
        with dash_attn.watch(model, to=to):
            out = model(x())
            if evaluates:
                with torch.no_grad():
                    model(torch.ones(4, 8))
            out.sum().backward()
        return load_run(to)[0]

    plain, evaluated = run(tmp_path / "a", False), run(tmp_path / "b", True)
    assert rows(plain.steps[0], "recompute") == ["part:input"]
    assert first_difference([plain], [evaluated]) is None


def test_a_tensor_of_several_steps(tmp_path: Path) -> None:
    """The hook on a tensor that lives on ends with its step: its gradient is recorded once in a step."""
    model, prompt = nn.Linear(8, 8), torch.ones(4, 8, requires_grad=True)
    with dash_attn.watch(model, to=tmp_path):
        for _ in range(3):
            model(prompt).sum().backward()
    assert [rows(step, "backward").count(":input") for step in load_run(tmp_path)[0].steps.values()] == [1, 1, 1]


def test_weights_changed_before_the_step_in_which_a_run_ended(tmp_path: Path) -> None:
    """Only one run changes them, and the other has no forward after it that could show it."""

    def run(to: Path, changes: bool) -> Record:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dash_attn.watch(model, optimizer=optimizer, to=to):
            model(x()).sum().backward()
            optimizer.step()
            if changes:
                with torch.no_grad():
                    model.weight.mul_(2)
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
            else:
                model.forward = fail  # type: ignore[method-assign, assignment]
                with suppress(ValueError):
                    model(torch.ones(4, 8))
        return load_run(to)[0]

    def fail(x: Tensor) -> Tensor:
        raise ValueError

    changed, ended = run(tmp_path / "a", True), run(tmp_path / "b", False)
    for pair in ((changed, ended), (ended, changed)):
        parting = first_difference([pair[0]], [pair[1]])
        assert parting is not None and (parting.step, parting.tensor, parting.topic) == (1, "weight", "between")


@pytest.mark.parametrize("last", [0, 2])
def test_a_run_that_ended_in_the_middle_of_a_step(tmp_path: Path, last: int) -> None:
    """The step is compared up to its end. What it does not have is no difference."""

    def run(to: Path, stops: bool, factor: float = 1) -> list[Record]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dash_attn.watch(model, optimizer=optimizer, to=to):
            for step in range(4):
                out = model(x() * (factor if step == last else 1))
                if stops and step == last:
                    break
                out.sum().backward()
                optimizer.step()
        return load_run(to)

    whole, cut, other = run(tmp_path / "a", False), run(tmp_path / "b", True), run(tmp_path / "c", True, factor=2)
    assert max(cut[0].steps) == last
    assert first_difference(whole, cut) is None and first_difference(cut, whole) is None
    for pair in ((whole, other), (other, whole)):
        parting = first_difference(*pair)
        assert parting is not None and (parting.step, parting.topic) == (last, "data")
