"""Calls seen before are not checked again, and nothing that a check would refuse gets past it by that."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import dash_attn
from dash_attn.api import calls
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
    module = importlib.import_module("dash_attn.api.backward")
    for name in ("problem_of", "check_like", "check_lse", "prepare"):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("checked again"))
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
    monkeypatch.setattr(calls, "KEPT", 3)
    calls._seen.clear()
    for cut in range(1, 9):
        dash_attn.backward(**arguments(cu_seqlens_q=[0, cut, LENGTH]))
        assert len(calls._seen) <= 3


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
    monkeypatch.setattr(calls, "_seen", {})
    q, k, v = (torch.randn(LENGTH, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    cu = torch.tensor([0, 13, LENGTH], dtype=torch.int32)
    read = []
    monkeypatch.setattr(calls, "_values", {})
    for _ in range(3):
        dash_attn.attention(q, k, v, causal=True, cu_seqlens=cu).sum().backward()
        read.append(dict(counts))
    assert read[0]["__post_init__"] == 1 + 2 and read[0]["plan"] == 2 and read[0]["tolist"] == read[2]["tolist"]
    assert read[1] == read[2] == read[0]


def test_boundaries_are_read_once_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is known by identity and version: what changes it, or another tensor, is read again."""
    reads: list[int] = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (reads.append(id(x)), original(x))[1])
    cu = torch.tensor([0, 7, LENGTH], dtype=torch.int32)
    assert calls.read(cu) == calls.read(cu) == (0, 7, LENGTH) and len(reads) == 1
    cu[1] = 9
    assert calls.read(cu) == (0, 9, LENGTH) and len(reads) == 2
    assert calls.read(cu.clone()) == (0, 9, LENGTH) and len(reads) == 3
