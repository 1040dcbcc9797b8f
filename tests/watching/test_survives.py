"""A script that is watched runs to its end, whatever it does with its model, and its training steps are recorded."""

from __future__ import annotations

import copy
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.masked import masked_tensor

import dash_attn
from dash_attn.tools.cli import reasons
from dash_attn.watching.environment import environment, random_states
from dash_attn.watching.files import Step, load, load_run
from dash_attn.watching.watcher import Watcher


def x() -> Tensor:
    return torch.ones(4, 8)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def watched(to: Path, model: nn.Module, before: Callable[[Watcher], Any] = lambda watcher: None) -> Step:
    """The first step of a run. `before` is called first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dash_attn.watch(model, optimizer=optimizer, to=to) as watcher:
        before(watcher)
        model(x()).sum().backward()
        optimizer.step()
    (record,) = load_run(to)
    return record.steps[0]


def rows(step: Step, phase: str) -> list[str]:
    return [f"{row.module}:{row.tensor}" for row in step.rows if row.phase == phase]


class Takes(nn.Module):
    """A linear layer, then a function, then a part that reads what the function gives."""

    def __init__(self, give: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.part = Gives(give)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.part(x))


class Gives(nn.Module):
    def __init__(self, give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.give = nn.Linear(8, 8), give

    def forward(self, x: Tensor) -> Any:
        return self.give(self.linear(x))


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_a_quantized_output(tmp_path: Path) -> None:
    model = Takes(
        lambda h: torch.quantize_per_tensor(h.detach(), 0.1, 0, torch.qint8), lambda q: q.dequantize().requires_grad_()
    )
    assert rows(watched(tmp_path, model), "forward") == [
        "part:input",
        "part.linear:input",
        "part.linear:output",
        ":output",
    ]


@pytest.mark.filterwarnings("ignore:.*prototype.*:UserWarning")
def test_a_masked_output(tmp_path: Path) -> None:
    model = Takes(lambda h: (h, masked_tensor(h.detach(), h.detach() > 0)), lambda both: both[0])
    assert "part:output[0]" in rows(watched(tmp_path, model), "forward")


def test_a_list_that_contains_itself(tmp_path: Path) -> None:
    def give(h: Tensor) -> list[Any]:
        endless: list[Any] = [h]
        endless.append(endless)
        return endless

    assert "part:output[0]" in rows(watched(tmp_path, Takes(give, lambda value: value[0])), "forward")


def test_a_saved_model_and_a_copy_are_not_watched(tmp_path: Path) -> None:
    model, copies = small(), list[nn.Module]()

    def before(watcher: Watcher) -> None:
        torch.save(model, tmp_path / "model.pt")
        copies.extend([torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)])
        for each in copies:
            each(x()).sum().backward()

    step = watched(tmp_path / "a", model, before)
    assert rows(step, "data") == [":input"]
    assert step.rows == watched(tmp_path / "b", small()).rows
    for each in copies:
        assert torch.equal(each(x()), each(x()))


def exported(model: nn.Module, strict: bool) -> None:
    torch.export.export(model, (x(),), strict=strict)


def fake(model: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.randn(4, 8))


def per_sample(model: nn.Module) -> None:
    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, parameters, (one,)).sum()

    vmap(grad(loss), (None, 0))(dict(model.named_parameters()), x())


def dual(model: nn.Module) -> None:
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x(), x()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "use",
    [
        lambda model: exported(model, strict=False),
        lambda model: exported(model, strict=True),
        fake,
        per_sample,
        dual,
        lambda model: torch.func.jvp(model, (x(),), (x(),)),
        lambda model: torch.func.hessian(lambda one: model(one).sum())(torch.ones(8)),
        lambda model: torch.jit.trace(model, x(), check_trace=False),
    ],
    ids=["export", "strict export", "fake", "vmap", "dual", "jvp", "hessian", "trace"],
)
def test_a_forward_that_is_traced_or_transformed_is_no_part_of_a_step(
    tmp_path: Path, use: Callable[[nn.Module], Any]
) -> None:
    model = small()
    step = watched(tmp_path, model, lambda watcher: use(model))
    assert rows(step, "data") == [":input"]
    assert rows(step, "forward") == ["0:input", "0:output", "1:input", "1:output", ":output"]


def test_a_transform_inside_the_model(tmp_path: Path) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = small()

        def forward(self, x: Tensor) -> Tensor:
            return vmap(self.part)(x)

    assert rows(watched(tmp_path, Inside()), "forward") == [":output"]


def test_what_is_seen_in_inference_mode(tmp_path: Path) -> None:
    def see(watcher: Watcher) -> None:
        with torch.inference_mode():
            watcher.see("validation", x() * 2)

    assert rows(watched(tmp_path, small(), see), "data") == [":validation", ":input"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_part(tmp_path: Path) -> None:
    step = watched(tmp_path, nn.Sequential(nn.Linear(8, 8), torch.jit.script(small())))
    assert rows(step, "forward") == ["0:input", "0:output", ":output"]
    assert {"0:weight", "1.0:weight"} <= set(rows(step, "update"))


def test_lazy_modules(tmp_path: Path) -> None:
    step = watched(tmp_path, nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8), nn.LazyBatchNorm1d()))
    assert "1:gradient of weight" in rows(step, "reduce") and "1:weight" in rows(step, "update")
    assert rows(step, "start") == ["0:weight", "0:bias", "2:num_batches_tracked"]


@pytest.fixture(params=["cuda", "mkldnn"])
def newer_setting(request: pytest.FixtureRequest) -> Iterator[str]:
    """After one of torch's newer settings its older function raises."""
    backend = getattr(torch.backends, request.param)
    backend.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    yield f"float32 precision of {request.param} matmul"
    backend.matmul.fp32_precision = "none"


def test_a_newer_setting_of_tf32(tmp_path: Path, newer_setting: str) -> None:
    watched(tmp_path, small())
    (record,) = load_run(tmp_path)
    assert record.environment[newer_setting] == "tf32"
    assert reasons.precision({}).found == "float32 products in TF32"


def test_an_older_setting_of_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    assert environment()["float32 precision of cuda matmul"] == "tf32"
    torch.set_float32_matmul_precision(before)
    assert environment()["float32 precision of cuda matmul"] == "ieee"


@pytest.fixture
def another_generator() -> Iterator[np.random.BitGenerator]:
    before, other = np.random.get_bit_generator(), np.random.PCG64(1)
    np.random.set_bit_generator(other)
    yield other
    np.random.set_bit_generator(before)


def test_another_generator_of_numpy(another_generator: np.random.BitGenerator) -> None:
    def state() -> int:
        return dict(random_states(torch.device("cpu")))["numpy.random"]

    before = state()
    assert before == state()
    np.random.rand()
    assert before != state()


class Ignores(Takes):
    """Takes a value that it does not use."""

    def forward(self, x: Tensor, value: Any = None) -> Tensor:
        return super().forward(x)


class Closed(dict[str, Any]):
    def items(self) -> Any:
        raise ValueError("a mapping that shows nothing")


def deep() -> list[Any]:
    value = list[Any]()
    for _ in range(3000):
        value = [value]
    return value


class Unreadable(Tensor):
    @property
    def layout(self) -> Any:  # type: ignore[override]
        raise ValueError("a tensor that shows nothing")


@pytest.mark.parametrize(
    "given", [Closed(a=1), deep(), torch.ones(1).as_subclass(Unreadable)], ids=["map", "deep", "tensor"]
)
def test_an_error_in_a_hook_ends_the_record_and_not_the_training(tmp_path: Path, given: Any) -> None:
    def losses(to: Path | None) -> list[float]:
        torch.manual_seed(0)
        model = Ignores(torch.tanh, lambda h: h)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watcher = None if to is None else dash_attn.watch(model, optimizer=optimizer, to=to)
        values = list[float]()
        for step in range(4):
            loss = model(x(), given if step == 2 else None).sum()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        if watcher is not None:
            watcher.see("afterwards", given)
            watcher.close()
        return values

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert losses(tmp_path) == losses(None)
    (warning,) = (str(each.message) for each in told if "dash_attn.watch" in str(each.message))
    assert "training continues" in warning
    (record,) = load_run(tmp_path)
    assert sorted(record.steps) == [0, 1] and record.complete


@pytest.mark.parametrize("where", ["_gradient", "_parameter_gradient", "_end_backward", "_before_update", "_state_of"])
def test_an_error_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("anywhere")

    monkeypatch.setattr(Watcher, where, fail)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = dash_attn.watch(model, optimizer=optimizer, to=tmp_path)
    with pytest.warns(UserWarning, match="training continues: ValueError: anywhere"):
        model(x()).sum().backward()
        optimizer.step()
        watcher.close()
    assert not load(tmp_path / "rank0.watch").steps


@pytest.mark.filterwarnings("error")
def test_an_error_if_warnings_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("anywhere")

    monkeypatch.setattr(Watcher, "_before_update", fail)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dash_attn.watch(model, optimizer=optimizer, to=tmp_path):
        for _ in range(2):
            model(x()).sum().backward()
            optimizer.step()
    err = capsys.readouterr().err
    assert err.count("training continues: ValueError: anywhere") == 1 and err.count("\n") == 1


def test_a_full_disk_ends_the_record_and_not_the_training(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
            with dash_attn.watch(model, optimizer=optimizer, to=tmp_path) as watcher:
                for _ in range(50):
                    model(x()).sum().backward()
                    optimizer.step()
            watcher.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
    (warning,) = (str(each.message) for each in told if "dash_attn.watch" in str(each.message))
    assert "rank0.watch" in warning and "training continues" in warning
    (record,) = load_run(tmp_path)
    assert 0 < len(record.steps) < 50 and not record.complete
