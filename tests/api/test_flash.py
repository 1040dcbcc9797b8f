"""flash_attn_func and flash_attn_varlen_func: the signatures of FlashAttention 2 and 3, and what is refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import pairwise
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
    ({"causal": True, "panels": 3}, {"causal": True, "panels": 3}),
    ({"softcap": 2.0, "learnable_sink": torch.arange(4.0)}, {"softcap": 2.0, "sinks": torch.arange(4.0)}),
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
    assert nothing is None
    want, want_lse = attention(*leaves, cu_seqlens=boundaries, return_lse=True, **ours)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert torch.equal(function(*leaves, **theirs), want)
    for got, expected in zip(
        torch.autograd.grad(out.square().sum(), leaves), torch.autograd.grad(want.square().sum(), leaves), strict=True
    ):
        assert torch.equal(got, expected)


def test_dropout_draws_its_seed() -> None:
    leaves = dense()
    torch.manual_seed(3)
    seed = torch.randint(2**63 - 1, ())
    torch.manual_seed(3)
    first, second = (flash_attn_func(*leaves, dropout_p=0.5) for _ in range(2))
    assert torch.equal(first, attention(*leaves, dropout=0.5, seed=seed))
    assert not torch.equal(first, second)


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
    given = {"attention_chunk": 64}.get(name, torch.zeros(2))
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
        ({"window_size": (1.5, 0)}, r"^window_size must be \(left, right\)"),
        ({"softmax_scale": float("nan")}, "^softmax_scale must be a finite number"),
        ({"sm_margin": -1}, "sm_margin must be a whole number from 0"),
    ],
)
def test_bad_values_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        flash_attn_func(*dense(), **arguments)


# ---- seqused -----------------------------------------------------------------------------------------------

CU_Q, CU_K = [0, 40, 40, 41, 100, 300], [0, 30, 50, 60, 200, 310]
USED = [
    ([17, 0, 1, 59, 130], [30, 5, 3, 70, 0]),
    ([0, 0, 0, 20, 200], [12, 20, 10, 0, 110]),
    (None, [1, 0, 10, 139, 60]),
    ([40, 0, 0, 3, 7], None),
]


def unequal(seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(n, heads, 16) for n, heads in ((CU_Q[-1], 4), (CU_K[-1], 2), (CU_K[-1], 2))]


def spoiled(x: Tensor, cu: list[int], used: list[int] | None) -> Tensor:
    """The tensor with NaN in unused rows. Rows are dimension 0."""
    x = x.clone()
    for (begin, end), count in zip(pairwise(cu), used or [], strict=used is not None):
        x[begin + count : end] = math.nan
    return x


def lengths(cu: list[int], used: list[int] | None) -> list[int]:
    return [end - begin for begin, end in pairwise(cu)] if used is None else used


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window_size": (20, 3)}, {"window_size": (None, -4)}], ids=str)
@pytest.mark.parametrize(("used_q", "used_k"), USED)
def test_unused_rows_take_no_part(used_q: list[int] | None, used_k: list[int] | None, how: dict[str, Any]) -> None:
    """Each sequence is as if it were alone and had no unused rows, although these are NaN, in dout too."""
    q, k, v = unequal()
    leaves = [
        spoiled(x, cu, used).requires_grad_()
        for x, cu, used in ((q, CU_Q, used_q), (k, CU_K, used_k), (v, CU_K, used_k))
    ]
    out, lse, _ = flash_attn_varlen_func(
        *leaves, CU_Q, CU_K, seqused_q=used_q, seqused_k=used_k, return_attn_probs=True, **how
    )
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, spoiled(dout, CU_Q, used_q))
    want = [torch.zeros_like(out), torch.full_like(lse, -math.inf), *map(torch.zeros_like, leaves)]
    rows = zip(CU_Q[:-1], lengths(CU_Q, used_q), CU_K[:-1], lengths(CU_K, used_k), strict=True)
    for first_q, count_q, first_k, count_k in rows:
        mine, theirs = slice(first_q, first_q + count_q), slice(first_k, first_k + count_k)
        alone = [x[None, part].detach().requires_grad_() for x, part in ((q, mine), (k, theirs), (v, theirs))]
        single, single_lse, _ = flash_attn_func(*alone, return_attn_probs=True, **how)
        want[0][mine], want[1][:, mine] = single[0].detach(), single_lse[0]
        for total, part, grad in zip(
            want[2:], (mine, theirs, theirs), torch.autograd.grad(single, alone, dout[None, mine]), strict=True
        ):
            total[part] = grad[0]
    for got, expected in zip((out.detach(), lse, *grads), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("right", [None, -9, -3, 0, 4])
@pytest.mark.parametrize("left", [None, -9, -3, 0, 2, 9])
def test_windows_are_those_of_flash_attention(left: int | None, right: int | None, causal: bool) -> None:
    """FlashAttention 4 first lets causal set the right side to 0, then drops both sides if no key is between them."""
    q, k, v = torch.randn(1, 7, 1, 8), torch.randn(1, 9, 1, 8), torch.randn(1, 9, 1, 8)
    place, keys = torch.arange(7)[:, None] + 2, torch.arange(9)
    end = 0 if causal else right
    if left is not None and end is not None and left + end < 0:
        seen = keys <= place if causal else torch.ones(7, 9, dtype=torch.bool)
    else:
        seen = (keys >= place - (99 if left is None else left)) & (keys <= place + (99 if end is None else end))
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, window_size=(left, right), return_attn_probs=True)
    scores = (q[0, :, 0] @ k[0, :, 0].T / math.sqrt(8)).masked_fill(~seen, -math.inf)
    assert torch.allclose(lse[0, 0], scores.logsumexp(-1), atol=1e-5)
    assert torch.allclose(out[0, :, 0], scores.softmax(-1).nan_to_num(0.0) @ v[0, :, 0], atol=1e-5)


def test_used_rows_are_tensors_or_lists_and_their_values_count() -> None:
    used_q, used_k = (torch.tensor(used, dtype=torch.int32) for used in USED[0])
    listed = flash_attn_varlen_func(*unequal(), CU_Q, CU_K, seqused_q=USED[0][0], seqused_k=USED[0][1])
    assert torch.equal(flash_attn_varlen_func(*unequal(), CU_Q, CU_K, seqused_q=used_q, seqused_k=used_k), listed)
    used_q[0] = 3
    other = flash_attn_varlen_func(*unequal(), CU_Q, CU_K, seqused_q=used_q, seqused_k=used_k)
    assert other[2].any() and not other[3:17].any() and listed[3:17].any()


def test_every_row_used_is_no_limit() -> None:
    every = {"seqused_q": lengths(CU_Q, None), "seqused_k": lengths(CU_K, None)}
    want = flash_attn_varlen_func(*unequal(), CU_Q, CU_K, causal=True)
    assert torch.equal(flash_attn_varlen_func(*unequal(), CU_Q, CU_K, causal=True, **every), want)


@pytest.mark.parametrize("none", [[], torch.zeros(0, dtype=torch.int32)], ids=["list", "tensor"])
def test_no_sequences_have_no_used_rows(none: list[int] | Tensor) -> None:
    nothing = [x[:0] for x in packed()]
    assert flash_attn_varlen_func(*nothing, [0], [0], seqused_q=none, seqused_k=none).shape == nothing[0].shape
    with pytest.raises(ValueError, match=r"seqused_q .* each of the 0 sequences; got 1"):
        flash_attn_varlen_func(*nothing, [0], [0], seqused_q=[0])


def test_bad_boundaries_are_named_as_the_caller_knows_them() -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens_k must begin with 0.*\[0, 49\]"):
        flash_attn_varlen_func(*packed(), [0, 50], [0, 49])
    with pytest.raises(ValueError, match="cu_seqlens_q goes with packed"):
        flash_attn_varlen_func(*dense(), CU, CU)
