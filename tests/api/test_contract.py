"""What a caller may rely on: strict determinism, the memory of the results, the current GPU and CUDA graphs."""

from __future__ import annotations

import gc
import itertools
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dash_attn
from dash_attn.api import calls
from dash_attn.api.autograd import Attention, FeaturedAttention
from dash_attn.api.overlap import refuse_overlap
from dash_attn.backends import Backward, Forward, Operands, Options
from dash_attn.backends.cpu.backend import CpuBackend
from dash_attn.pack import Planned
from dash_attn.prepare import Prepared, prepare
from dash_attn.problem import Problem

# ---- deterministic=False under torch.use_deterministic_algorithms -------------------------------------------


@pytest.fixture
def strict() -> Iterator[Callable[..., None]]:
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def without_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU stands for a backend that can leave the order out."""

    def forget() -> None:
        calls._seen.clear()
        prepare.cache_clear()

    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    monkeypatch.setattr(CpuBackend, "always_deterministic", False)
    forget()
    yield
    forget()


def leaves(*sizes: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*(sizes or (1, 40)), heads, 8, requires_grad=True) for heads in (4, 2, 2)]


def eager(**how: Any) -> None:
    dash_attn.attention(*leaves(), causal=True, **how).sum().backward()


def traced(**how: Any) -> None:
    run = torch.compile(dash_attn.attention, backend="aot_eager", fullgraph=True)
    run(*leaves(), causal=True, **how).sum().backward()


def direct(**how: Any) -> None:
    q, k, v = (x.detach() for x in leaves())
    out, lse = dash_attn.attention(q, k, v, causal=True, return_lse=True)
    dash_attn.backward(out, q, k, v, out, lse, causal=True, **how)


WAYS = pytest.mark.parametrize("way", [eager, traced, direct])


@WAYS
def test_a_backward_without_order_is_an_error_if_torch_is_strict(
    way: Callable[..., None], without_order: None, strict: Callable[..., None]
) -> None:
    way(deterministic=False)
    strict(True)
    for _ in range(2):  # also when the call is known
        with pytest.raises(RuntimeError, match=r"deterministic=False.*use_deterministic_algorithms\(True\) is set"):
            way(deterministic=False)
    way(deterministic=True)
    way(deterministic=None)
    strict(False)
    way(deterministic=False)


@WAYS
def test_it_is_a_warning_if_torch_only_warns(
    way: Callable[..., None], without_order: None, strict: Callable[..., None]
) -> None:
    strict(True, warn_only=True)
    with pytest.warns(UserWarning, match="deterministic=False"):
        way(deterministic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        direct(deterministic=True)


def test_the_forward_alone_has_no_order_to_keep(without_order: None, strict: Callable[..., None]) -> None:
    strict(True)
    dash_attn.attention(*(x.detach() for x in leaves()), deterministic=False)


def test_torch_is_asked_when_the_backward_runs(
    without_order: None, strict: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's operators do: the setting at the forward does not count."""
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    out = dash_attn.attention(*leaves())
    strict(True)
    with pytest.raises(RuntimeError, match="FLASH_ATTENTION_DETERMINISTIC=0"):
        out.sum().backward()


@WAYS
def test_the_cpu_keeps_the_order_and_raises_nothing(way: Callable[..., None], strict: Callable[..., None]) -> None:
    strict(True)
    way(deterministic=False)


# ---- memory of the results ------------------------------------------------------------------------------------


def operands(tokens: int = 20) -> dict[str, Tensor]:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, tokens, 4, 8) for _ in range(4))
    out, lse = dash_attn.attention(q, k, v, causal=True, return_lse=True)
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}


@pytest.mark.parametrize("first", ["dq", "dk", "dv"])
@pytest.mark.parametrize("second", ["dq", "dk", "dv", "dout", "q", "k", "v", "out", "lse"])
def test_results_that_share_memory_are_refused(first: str, second: str) -> None:
    if first == second:
        return
    given = operands()
    shape, storage = given["q"].shape, torch.zeros(2 * given["q"].numel())
    room = storage[: given["q"].numel()].view(shape)
    shifted = storage[given["q"].numel() - 1 :][: given["q"].numel()].view(shape)  # one element is common
    dash_attn.backward(**given, causal=True, **{first: room})  # the call is known from now on
    if second == "lse":
        given["lse"] = room.flatten()[: given["lse"].numel()].view(given["lse"].shape)
        changes = {first: room}
    elif second in given:
        given[second] = shifted.copy_(given[second])
        changes = {first: room}
    else:
        changes = {first: room, second: shifted}
    for _ in range(2):
        with pytest.raises(ValueError, match="share memory") as error:
            dash_attn.backward(**given, causal=True, **changes)
        assert set(re.match(r"(\w+) and (\w+) share", str(error.value)).groups()) == {first, second}


@pytest.mark.parametrize("dim", [2, 3, 4])
def test_slices_of_one_tensor_take_results(dim: int) -> None:
    given = operands()
    want = dash_attn.backward(**given, causal=True)
    shape = list(given["q"].shape)
    shape.insert(dim, 3)
    dq, dk, dv = torch.full(shape, float("nan")).unbind(dim)
    dash_attn.backward(**given, causal=True, dq=dq, dk=dk, dv=dv)
    assert all(torch.equal(a, b) for a, b in zip((dq, dk, dv), want, strict=True))


def test_the_comparison_agrees_with_a_map_of_the_memory() -> None:
    """Random views of one storage, compared with the sets of their elements."""
    rng, answers = np.random.default_rng(0), set()
    storage = torch.arange(4000)
    for _ in range(500):
        views = []
        for _ in "xy":
            shape, strides = rng.integers(0 if rng.random() < 0.1 else 1, 5, 3), rng.integers(0, 40, 3)
            views.append(torch.as_strided(storage, shape.tolist(), strides.tolist(), int(rng.integers(0, 300))))
        shared = bool(set(views[0].flatten().tolist()) & set(views[1].flatten().tolist()))
        answers.add(shared)
        for x, y in itertools.permutations(views):
            try:
                refuse_overlap([("x", x)], [("y", y)])
            except ValueError:
                assert shared
            else:
                assert not shared
    assert answers == {True, False}


def test_autograd_compares_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_attn.api.overlap._range", lambda x: pytest.fail("compared"))
    eager()
    direct()


def test_no_sequences_and_given_results() -> None:
    given = {name: x[:0] for name, x in operands().items()}
    rooms = {name: torch.empty_like(given["q"]) for name in ("dq", "dk", "dv")}
    grads = dash_attn.backward(**given, causal=True, **rooms)
    assert [x.shape for x in grads] == [given["q"].shape] * 3


@pytest.mark.parametrize("kind", [Attention, FeaturedAttention])
def test_no_gradient_of_lse_is_filled_with_zeros(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that took a third of the host time of a backward."""
    came, backward = list[tuple[Tensor | None, ...]](), kind.backward
    monkeypatch.setattr(
        kind, "backward", staticmethod(lambda ctx, *grads: (came.append(grads), backward(ctx, *grads))[1])
    )
    how = {"sinks": torch.zeros(4)} if kind is FeaturedAttention else {}
    eager(**how)
    ((dout, dlse),) = came
    assert dout is not None and dlse is None


# ---- GPUs, played by the CPU ----------------------------------------------------------------------------------


class Gpus:
    """Two GPUs. `current` is the current one, and `ran` has the current one of every kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.ran, self.captures = 0, list[int](), False
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.guard)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)

    @contextmanager
    def guard(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def prepared(self, index: int) -> Prepared:
        """A problem on one of the GPUs."""
        gpus = self

        class Played(CpuBackend):
            device = torch.device("cuda", index)

            def forward(self, problem: Problem) -> Forward:
                run = super().forward(problem)
                return lambda *given: (gpus.ran.append(gpus.current), run(*given))[1]

            def backward(self, plan: Planned, options: Options) -> Backward:
                run = super().backward(plan, options)
                return lambda *given: (gpus.ran.append(gpus.current), run(*given))[1]

        return Prepared(Problem(1, 4, 2, 40, 40, 8, "float32"), "auto", Options(), Played())


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@pytest.mark.parametrize("current", [0, 1])
def test_a_call_runs_on_the_gpu_of_its_tensors(current: int, gpus: Gpus) -> None:
    gpus.current, prepared = current, gpus.prepared(1)
    q, k, v = (x.detach() for x in leaves())
    out, lse = prepared.forward(q, k, v)
    grads = prepared.backward(Operands(out, q, k, v, out, lse))
    assert gpus.ran == [1, 1] and gpus.current == current
    want = dash_attn.backward(out, q, k, v, out, lse)
    assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))


@pytest.mark.parametrize("captures", [False, True])
def test_what_a_graph_uses_is_kept(captures: bool, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_attn.prepare._captured", set())
    gpus.captures, prepared = captures, gpus.prepared(0)
    prepared.forward(*(x.detach() for x in leaves()))
    kept = weakref.ref(prepared)
    del prepared
    gc.collect()
    assert (kept() is not None) is captures
