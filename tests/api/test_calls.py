"""Calls seen before are not checked again, and nothing that a check would refuse gets past it by that."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import dash_attn
from dash_attn.api import calls, gradients
from dash_attn.api.explain import explanation
from dash_attn.backends import Operands, Options
from dash_attn.kept import ENTRY_BYTES, Kept, bytes_of
from dash_attn.pack import Pack
from dash_attn.plan import Plan, placement, plan
from dash_attn.prepare import prepare
from dash_attn.problem import Problem

LENGTH = 24


def arguments(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(LENGTH, heads, 8) for heads in (4, 2, 2))
    how = {"causal": True, "cu_seqlens_q": [0, 10, LENGTH]}
    out, lse = dash_attn.attention(q, k, v, causal=True, cu_seqlens=[0, 10, LENGTH], return_lse=True)
    return {"dout": torch.ones_like(out), "q": q, "k": k, "v": v, "out": out, "lse": lse, **how, **changes}


def test_a_second_call_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = dash_attn.backward(**arguments())
    for name in ("problem_of", "check_like", "check_lse", "prepare"):
        monkeypatch.setattr(gradients, name, lambda *_, **__: pytest.fail("checked again"))
    second = dash_attn.backward(**arguments())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"sm_margin": 0.0},
        {"sm_margin": -1},
        {"causal": 1},
        {"deterministic": 1},
        {"window": (3.0, 0)},
        {"window": (3,)},
        {"cu_seqlens_q": [0.0, 10.0, float(LENGTH)]},
        {"cu_seqlens_q": torch.tensor([0, 10, LENGTH], dtype=torch.float32)},
        {"cu_seqlens_q": torch.tensor([[0, 10, LENGTH]], dtype=torch.int32)},
        {"cu_seqlens_q": [0, 10, LENGTH + 1]},
        {"policy": "other"},
        {"scale": float("nan")},
        {"dq": torch.empty(LENGTH, 4, 9)},
        {"dk": torch.empty(LENGTH, 4, 8)},
        {"out": torch.empty(LENGTH, 4, 9)},
        {"lse": torch.empty(LENGTH, 4)},
        {"v": np.zeros((LENGTH, 2, 8), np.float32)},
        {"q": None},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_refused_stays_refused(changes: dict[str, Any]) -> None:
    for window in (None, (3, 0)):
        dash_attn.backward(**arguments(window=window))
        dash_attn.backward(**arguments(window=window, cu_seqlens_q=torch.tensor([0, 10, LENGTH], dtype=torch.int32)))
        dash_attn.backward(**arguments(window=window, dq=torch.empty(LENGTH, 4, 8)))
    for _ in range(2):
        with pytest.raises(ValueError):
            dash_attn.backward(**arguments(**changes))


def test_a_pack_is_asked_for_its_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack that cannot be ordered is asked again, and refused again."""
    asked, original = list[Pack](), Pack.require_order
    monkeypatch.setattr(Pack, "require_order", lambda pack: (asked.append(pack), original(pack))[1])
    q, k, v = (torch.randn(LENGTH, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    how = {"cu_seqlens": [0, 9, LENGTH], "causal": True, "policy": "symmetric_shift:3"}
    for _ in range(3):
        dash_attn.attention(q, k, v, **how)
    assert len(asked) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="'spt' cannot take width 3"):
            dash_attn.attention(q, k, v, **how | {"policy": "spt:3"})
    assert len(asked) == 3


def test_values_of_boundaries_count() -> None:
    """The same tensor with other values is another problem."""
    cu = torch.tensor([0, 10, LENGTH], dtype=torch.int32)
    first = dash_attn.backward(**arguments(cu_seqlens_q=cu))
    cu[1] = 12
    second = dash_attn.backward(**arguments(cu_seqlens_q=cu))
    assert not torch.equal(first.dk, second.dk)
    again = dash_attn.backward(**arguments(cu_seqlens_q=[0, 10, LENGTH]))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_values_of_window_sides_count() -> None:
    side = torch.tensor(3)
    first = dash_attn.backward(**arguments(window=(side, 0)))
    side.fill_(5)
    second = dash_attn.backward(**arguments(window=(side, 0)))
    for got, left in ((first, 3), (second, 5)):
        assert all(
            torch.equal(a, b) for a, b in zip(got, dash_attn.backward(**arguments(window=(left, 0))), strict=True)
        )
    assert not torch.equal(first.dk, second.dk)


def test_what_cannot_be_remembered_still_runs() -> None:
    plain = dash_attn.backward(**arguments(window=(3, 0)))
    listed = dash_attn.backward(**arguments(window=[3, 0]))
    counted = dash_attn.backward(**arguments(window=(3, 0), cu_seqlens_q=np.array([0, 10, LENGTH])))
    for other in (listed, counted):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the calls nor the problems, plans and placements behind them take more bytes than they may."""
    given, most = [arguments(cu_seqlens_q=[0, cut, LENGTH]) for cut in range(1, 21)], 60_000
    monkeypatch.setattr(calls, "_seen", Kept(most, growing=lambda prepared: prepared))
    caches = [calls._seen, *(function.cache for function in (prepare, plan, placement))]
    for cache in caches:
        cache.clear()
        monkeypatch.setattr(cache, "limit", most)
    for number, each in enumerate(given, 1):
        dash_attn.backward(**each)
        for cache in caches:
            there = sum(ENTRY_BYTES + bytes_of(key, entry.value) for key, entry in cache._entries.items())
            assert there == pytest.approx(cache.nbytes, rel=0.05) and 0 < cache.nbytes <= most, number
    assert all(1 < len(cache) < len(given) for cache in caches)


@pytest.mark.parametrize("after", ["backward", "explain"])
def test_a_plan_is_counted_when_it_is_made(after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward needs no plan. Every cache that has the problem counts the plan as soon as it is there."""
    monkeypatch.setattr(calls, "_seen", Kept(growing=lambda prepared: prepared))
    prepare.cache_clear()
    ready = prepare(Problem(1, 16, 16, 512, 512, 8, "float32"), "auto", Options(), torch.device("cpu"))
    calls._seen.add("a call", ready)
    q = torch.randn(1, 512, 16, 8)
    out, lse = ready.forward(q, q, q)
    caches = (calls._seen, prepare.cache)
    before = [cache.nbytes for cache in caches]
    if after == "backward":
        ready.backward(Operands(out, q, q, q, out, lse))
    else:
        explanation(ready)
    assert isinstance(ready.plan, Plan)
    for cache, bytes_before in zip(caches, before, strict=True):
        assert cache.nbytes > bytes_before + ready.plan.program.nbytes


def test_a_packed_call_poses_its_problem_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call builds a Problem for itself and for each document, reads cu_seqlens once and plans each document
    once. The next calls do none of it."""
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (counts.update([name]), original(*a, **k))[1])

    counted(Problem, "__post_init__")
    counted(torch.Tensor, "tolist")
    counted(importlib.import_module("dash_attn.pack.pack"), "plan")
    monkeypatch.setattr(calls, "_seen", Kept())
    q, k, v = (torch.randn(LENGTH, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    cu = torch.tensor([0, 13, LENGTH], dtype=torch.int32)
    read = []
    monkeypatch.setattr(calls, "_values", {})
    monkeypatch.setattr(calls, "is_remembered", lambda x: True)  # as on a GPU
    for _ in range(3):
        dash_attn.attention(q, k, v, causal=True, cu_seqlens=cu).sum().backward()
        read.append(dict(counts))
    assert read[0]["__post_init__"] == 1 + 2 and read[0]["plan"] == 2 and read[0]["tolist"] == read[2]["tolist"]
    assert read[1] == read[2] == read[0]


def test_boundaries_are_read_once_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is known by identity and version: what changes it, or another tensor, is read again."""
    reads: list[int] = []
    monkeypatch.setattr(calls, "is_remembered", lambda x: True)  # as on a GPU
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (reads.append(id(x)), original(x))[1])
    cu = torch.tensor([0, 7, LENGTH], dtype=torch.int32)
    assert calls.read(cu) == calls.read(cu) == (0, 7, LENGTH) and len(reads) == 1
    cu[1] = 9
    assert calls.read(cu) == (0, 9, LENGTH) and len(reads) == 2
    assert calls.read(cu.clone()) == (0, 9, LENGTH) and len(reads) == 3


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_of_inference_mode_are_read_at_every_call(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count no changes, so nobody can know that they have not changed."""
    reads: list[int] = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (reads.append(id(x)), original(x))[1])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with torch.inference_mode(inference):
        cu = torch.tensor([0, 7, LENGTH], dtype=torch.int32)
    for _ in range(3):
        assert calls.read(cu) == (0, 7, LENGTH)
    assert len(reads) == (3 if inference else 1)
