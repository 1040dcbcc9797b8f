"""Adapters of peers, run on the CPU as far as that goes: arguments in the right places, gradients laid out as ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dash_attn.problem import CAUSAL, FULL, Problem, documents, window
from dash_attn.tools.bench.operands import draw_operands, error, exact_part
from dash_attn.tools.bench.peers import PEERS

CPU = torch.device("cpu")
PROBLEMS = [Problem(2, 4, 2, 80, 80, 16, "float32", 0.3, mask) for mask in (FULL, CAUSAL)]


@pytest.fixture(autouse=True)
def on_the_cpu(anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU peers may try the CPU, and nothing is compiled."""
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


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: str(p.mask))
def test_fa4(problem: Problem, fa4: list[dict]) -> None:
    check("fa4", problem)
    check("fa4 det", problem)
    assert [call["deterministic"] for call in fa4] == [False, False, True, True]
    assert all(call["softmax_scale"] == 0.3 and call["causal"] == problem.mask.is_causal for call in fa4)


@pytest.mark.parametrize("causal", [False, True])
def test_fa4_takes_documents(causal: bool, fa4: list[dict]) -> None:
    problem = Problem(1, 4, 2, 90, 90, 16, "float32", 0.3, documents([0, 20, 21, 90], causal=causal))
    check("fa4 det", problem)
    for call in fa4:
        assert call["causal"] == causal and call["deterministic"] and call["softmax_scale"] == 0.3
        assert call["max_seqlen_q"] == call["max_seqlen_k"] == 69
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            assert call[name].dtype == torch.int32 and call[name].tolist() == [0, 20, 21, 90]


@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 1, 1, 8, 9, 16, "float32", mask=documents([0, 4, 8], [0, 4, 9], causal=True)),
        Problem(2, 1, 1, 8, 8, 16, "float32", mask=documents([0, 4, 8])),
        Problem(1, 1, 1, 8, 8, 16, "float32", mask=documents([0, 4, 8]) & window(3, 0)),
    ],
    ids=["lengths", "batch", "window"],
)
def test_packs_that_libraries_take_differently_are_not_compared(problem: Problem, fa4: list[dict]) -> None:
    with pytest.raises(NotImplementedError):
        PEERS["fa4 det"].prepare(problem, [draw_operands(problem, CPU)])
    assert not fa4


def test_peers_without_documents_refuse_them() -> None:
    problem = Problem(1, 1, 1, 8, 8, 16, "float32", mask=documents([0, 4, 8], causal=True))
    for name in PEERS.keys() - {"fa4", "fa4 det", "triton two-pass"}:
        with pytest.raises(NotImplementedError, match="full and causal"):
            PEERS[name].prepare(problem, [draw_operands(problem, CPU)])


def test_other_masks_and_absent_packages_are_named() -> None:
    problem = Problem(1, 1, 1, 8, 8, 16, "float32", mask=window(3, 0))
    sets = [draw_operands(problem, CPU)]
    for name in ("torch math", "fa2", "flex"):
        with pytest.raises(NotImplementedError, match="full and causal"):
            PEERS[name].prepare(problem, sets)
    if not any((Path(p) / "flash_attn").exists() for p in sys.path):
        with pytest.raises(ImportError, match="flash_attn"):
            PEERS["fa4"].prepare(PROBLEMS[0], sets)
