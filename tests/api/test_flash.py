"""flash_attn_func and flash_attn_varlen_func: the signatures of FlashAttention 2 and 3, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn.api import attention, backward, flash_attn_func, flash_attn_varlen_func
from dash_attn.api.flash import WAY_OUT

CU = torch.tensor([0, 30, 50], dtype=torch.int32)
POSITIONAL = [
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
    "return_attn_probs",
]
PACKING = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
NAMED = [
    "softmax_scale",
    "causal",
    "qv",
    "q_descale",
    "k_descale",
    "v_descale",
    "window_size",
    "attention_chunk",
    "softcap",
    "num_splits",
]
NAMED += ["pack_gqa", "deterministic", "sm_margin", "return_attn_probs"]


def dense() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 50, heads, 16, requires_grad=True) for heads in (4, 2, 2)]


def packed() -> list[Tensor]:
    return [x[0].detach().requires_grad_() for x in dense()]


def varlen(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    return flash_attn_varlen_func(q, k, v, CU, CU, 30, 30, **arguments)


@pytest.mark.parametrize(
    ("function", "positional", "named"),
    [
        (flash_attn_func, ["q", "k", "v", *POSITIONAL], NAMED),
        (
            flash_attn_varlen_func,
            ["q", "k", "v", *PACKING, *POSITIONAL, "block_table"],
            [*PACKING, "seqused_q", "seqused_k", *NAMED],
        ),
    ],
)
def test_signatures(function: Callable[..., Any], positional: list[str], named: list[str]) -> None:
    """FlashAttention 2's by position, all of FlashAttention 3's by name, nothing behind **kwargs."""
    parameters = inspect.signature(function).parameters
    by_kind = {kind: [p.name for p in parameters.values() if p.kind == kind] for kind in inspect._ParameterKind}
    assert by_kind[inspect.Parameter.POSITIONAL_OR_KEYWORD] == positional
    assert set(named) <= set(parameters)
    assert not by_kind[inspect.Parameter.VAR_KEYWORD] and not by_kind[inspect.Parameter.VAR_POSITIONAL]
    assert parameters["window_size"].default == (-1, -1) and parameters["deterministic"].default is None


# As written for FlashAttention, and the same call of attention.
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"causal": True, "softmax_scale": 0.1}, {"causal": True, "scale": 0.1}),
    ({"window_size": (7, 0)}, {"window": (7, 0)}),
    ({"window_size": None, "softcap": None, "deterministic": True}, {}),
    ({"window_size": (None, 3), "deterministic": False}, {"window": (-1, 3)}),
    ({"num_splits": 0, "pack_gqa": True, "sm_margin": 4, "dropout_p": 0.0, "attention_chunk": 0}, {}),
]


@pytest.mark.parametrize(("theirs", "ours"), SAME, ids=lambda value: None)
@pytest.mark.parametrize(
    ("function", "inputs", "boundaries"),
    [(flash_attn_func, dense, None), (varlen, packed, CU)],
    ids=["dense", "varlen"],
)
def test_is_attention(
    function: Callable[..., Any],
    inputs: Callable[[], list[Tensor]],
    boundaries: Tensor | None,
    theirs: dict[str, Any],
    ours: dict[str, Any],
) -> None:
    leaves = inputs()
    out, lse, nothing = function(*leaves, return_attn_probs=True, **theirs)
    assert nothing is None and not lse.requires_grad
    want, want_lse = attention(*leaves, cu_seqlens=boundaries, return_lse=True, **ours)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert torch.equal(function(*leaves, **theirs), want)
    for got, expected in zip(
        torch.autograd.grad(out.square().sum(), leaves), torch.autograd.grad(want.square().sum(), leaves), strict=True
    ):
        assert torch.equal(got, expected)


def test_by_position() -> None:
    q, k, v = dense()
    want = attention(q, k, v, causal=True, scale=0.1, window=(7, -1))
    assert torch.equal(flash_attn_func(q, k, v, 0.0, 0.1, True, (7, -1)), want)
    q, k, v = packed()
    want = attention(q, k, v, cu_seqlens=CU, causal=True, scale=0.1)
    assert torch.equal(flash_attn_varlen_func(q, k, v, CU, CU, 30, 30, 0.0, 0.1, True), want)


def test_lse_is_what_backward_takes() -> None:
    leaves = packed()
    out, lse, _ = varlen(*leaves, return_attn_probs=True)
    assert lse.shape == (4, 50) and lse.dtype == torch.float32
    grads = backward(torch.ones_like(out), *(x.detach() for x in (*leaves, out)), lse, cu_seqlens_q=CU, cu_seqlens_k=CU)
    wanted = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("name", WAY_OUT)
def test_what_there_is_no_kernel_for_is_refused(name: str) -> None:
    given = {"dropout_p": 0.1, "softcap": 30.0, "attention_chunk": 64}.get(name, torch.zeros(2))
    functions = [(varlen, packed())]
    if name in inspect.signature(flash_attn_func).parameters:
        functions.append((flash_attn_func, dense()))
    for function, leaves in functions:
        with pytest.raises(NotImplementedError) as caught:
            function(*leaves, **{name: given})
        assert str(caught.value).startswith(f"{name} was given") and WAY_OUT[name] in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"window_size": (-2, 0)}, r"window must be \(left, right\)"),
        ({"softmax_scale": float("nan")}, "scale must be a finite number"),
        ({"sm_margin": -1}, "sm_margin must be a whole number from 0"),
    ],
)
def test_bad_values_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        flash_attn_func(*dense(), **arguments)


def test_bad_boundaries_are_named_as_the_caller_knows_them() -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens_k must begin with 0.*\[0, 49\]"):
        flash_attn_varlen_func(*packed(), [0, 50], [0, 49])
    with pytest.raises(ValueError, match="cu_seqlens_q goes with packed"):
        flash_attn_varlen_func(*dense(), CU, CU)
