"""Adapters of peers, run on the CPU as far as that goes: arguments in the right places, gradients laid out as ours."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from dash_attn.backends import Operands, Options
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Problem, window
from dash_attn.tools.bench import peers
from dash_attn.tools.bench.operands import draw_operands, error, exact_part
from dash_attn.tools.bench.peers import PEERS

CPU = torch.device("cpu")
PROBLEMS = [Problem(2, 4, 2, 80, 80, 16, "float32", 0.3, mask) for mask in (FULL, CAUSAL)]


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU peers may try the CPU, and nothing is compiled."""
    monkeypatch.setattr(peers, "on_gpu", lambda device: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def check(name: str, problem: Problem) -> None:
    sets = [draw_operands(problem, CPU, seed) for seed in range(2)]
    calls = PEERS[name].prepare(problem, sets)
    assert len(calls) == 2
    for call, operands in zip(calls, sets, strict=True):
        grads = call()
        assert [g.shape for g in grads] == [x.shape for x in (operands.q, operands.k, operands.v)]
        assert error(problem, tuple(grads), exact_part(problem, *operands[:4])) < 1e-5


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: str(p.mask))
@pytest.mark.parametrize("name", ["torch math", "flex"])
def test_through_autograd(name: str, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    # FlexAttention refuses to differentiate on CPUs before it could; its plain form, not compiled, can.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    check(name, problem)


@pytest.mark.parametrize("name", ["fa2", "fa2 det"])
def test_torchs_flash(name: str) -> None:
    check(name, Problem(2, 4, 4, 80, 80, 16, "float32", mask=CAUSAL))  # on CPUs it has no groups of heads


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """A package of that name, with the arguments it has and our own arithmetic; the keywords it was called with."""
    seen: list[dict] = []

    def bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, deterministic=False):
        seen.append({"scale": softmax_scale, "causal": causal, "deterministic": deterministic})
        mask = CAUSAL if causal else FULL
        problem = Problem(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], "float32", 0.3, mask)
        return (*prepare(problem, "fa3", Options(), CPU).backward(Operands(dout, q, k, v, out, lse)), None)

    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_bwd = bwd
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    sys.modules["flash_attn.cute"].interface = interface
    sys.modules["flash_attn"].cute = sys.modules["flash_attn.cute"]
    return seen


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: str(p.mask))
def test_fa4(problem: Problem, fa4: list[dict]) -> None:
    check("fa4", problem)
    check("fa4 det", problem)
    assert [call["deterministic"] for call in fa4] == [False, False, True, True]
    assert all(call["scale"] == 0.3 and call["causal"] == problem.mask.is_causal for call in fa4)


def test_other_masks_and_absent_packages_are_named() -> None:
    problem = Problem(1, 1, 1, 8, 8, 16, "float32", mask=window(3, 0))
    sets = [draw_operands(problem, CPU)]
    for name in ("torch math", "fa2", "flex"):
        with pytest.raises(NotImplementedError, match="full and causal"):
            PEERS[name].prepare(problem, sets)
    if not any((Path(p) / "flash_attn").exists() for p in sys.path):
        with pytest.raises(ImportError, match="flash_attn"):
            PEERS["fa4"].prepare(PROBLEMS[0], sets)
