"""Bad arguments are refused with their name, what was given and what is accepted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dash_attn.api import attention, backward, flash_attn_func, flash_attn_varlen_func
from dash_attn.api.arguments import check_torch, wants_determinism
from dash_attn.api.explain import explain
from dash_attn.backends import backend_for
from dash_attn.backends.sm90.alignment import aligned
from dash_attn.backends.sm90.backend import config_of
from dash_attn.problem import Problem, intervals, tiles


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


Q, K = (2, 8, 4, 16), (2, 8, 2, 16)
PACKED, PACKED_K = (8, 4, 16), (8, 2, 16)


def call(**changes: Any) -> dict[str, Any]:
    return {"q": zeros(*Q), "k": zeros(*K), "v": zeros(*K), **changes}


def packed(**changes: Any) -> dict[str, Any]:
    return {"q": zeros(*PACKED), "k": zeros(*PACKED_K), "v": zeros(*PACKED_K), **changes}


def cu(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls them a prototype
    nested = torch.nested.nested_tensor([torch.zeros(3, 4, 16), torch.zeros(5, 4, 16)], layout=torch.jagged)


class Sharded(Tensor):
    """Like torch's DTensor, which needs a process group."""

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


# The arguments, and words of the message. Each names the argument, what was given and what is accepted.
PREFIX = intervals([0] * 8, [4, 4, 4, 4, 5, 6, 7, 8])
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (call(q=[1.0]), ["q must be a torch.Tensor", "list"]),
    (call(k=np.zeros(K)), ["k must be a torch.Tensor", "ndarray"]),
    (call(q=zeros(8, 16)), ["q must be (batch, seqlen, heads, dim)", "(8, 16)"]),
    (call(k=zeros(8, 2, 16)), ["k", "number of dimensions of q, 4", "got 3"]),
    (call(q=zeros(*Q, dtype=torch.float64)), ["q", "float32, bfloat16, float16", "torch.float64"]),
    (call(v=zeros(*K, dtype=torch.bfloat16)), ["v", "dtype of q, torch.float32", "torch.bfloat16"]),
    (call(k=zeros(*K, device="meta")), ["k", "device of q, cpu", "meta"]),
    (call(k=zeros(2, 8, 2, 32)), ["k", "head dim of q, 16", "got 32"]),
    (call(v=zeros(2, 8, 2, 0)), ["dim_v must be at least 1", "got 0"]),
    (call(v=zeros(2, 8, 1, 8)), ["v must have the shape of k", "any head dim", "(2, 8, 1, 8)"]),
    (call(softcap=-1.0), ["softcap must be a finite number above 0", "got -1.0"]),
    (call(softcap=float("nan")), ["softcap must be a finite number above 0", "got nan"]),
    (call(softcap="50"), ["softcap must be a number", "got '50'"]),
    (call(softcap=True), ["softcap must be a number", "got True"]),
    (call(dropout=1.0), ["dropout must be at least 0 and below 1", "got 1.0"]),
    (call(dropout=-0.1), ["dropout must be at least 0 and below 1", "got -0.1"]),
    (call(sinks=[1.0]), ["sinks must be a torch.Tensor", "list"]),
    (call(sinks=zeros(2)), ["sinks must have one number for each of the 4 heads of q", "(2,)"]),
    (call(sinks=zeros(4, 1)), ["sinks must have one number for each of the 4 heads of q", "(4, 1)"]),
    (call(sinks=zeros(4, dtype=torch.int32)), ["sinks", "float32, bfloat16, float16", "torch.int32"]),
    (call(sinks=zeros(4, device="meta")), ["sinks", "on cpu", "on meta"]),
    (call(k=zeros(3, 8, 2, 16)), ["k", "batch", "2", "3"]),
    (call(v=zeros(2, 9, 2, 16)), ["v must have the shape of k", "(2, 8, 2, 16)", "(2, 9, 2, 16)"]),
    (call(panels=0), ["panels must be a whole number from 1", "got 0"]),
    (call(panels=2.0), ["panels must be a whole number from 1", "got 2.0"]),
    (call(panels=True), ["panels must be a whole number from 1", "got True"]),
    (call(panels=2, policy="level"), ["policy 'level' orders the last heads", "panels=2", "choose another policy"]),
    (call(panels=2, mask=tiles([[True]], 8, 8)), ["panels is 2", "mask has tiles", "leave panels at 1"]),
    (call(panels=2, mask=PREFIX), ["panels is 2", "mask has intervals row by row", "leave panels at 1"]),
    (call(mask=intervals([0], [1])), ["intervals of the mask are for 1 queries, not 8"]),
    (call(k=zeros(2, 8, 3, 16), v=zeros(2, 8, 3, 16)), ["k and v", "divides q's 4", "got 3"]),
    (call(k=zeros(2, 8, 0, 16), v=zeros(2, 8, 0, 16)), ["k and v", "divides q's 4", "got 0"]),
    (call(q=zeros(*Q).to_sparse()), ["q must be a dense tensor", "torch.sparse_coo"]),
    (call(q=torch.zeros(1, 4, 2, 16).as_subclass(Sharded)), ["q is a Sharded", "give", "q.to_local()"]),
    (call(q=nested), ["q must be a dense tensor", "packed", "nested"]),
    (call(q=zeros(2, 8, 4, 0), k=zeros(2, 8, 2, 0), v=zeros(2, 8, 2, 0)), ["dim", "at least 1", "0"]),
    (call(k=zeros(*K, dtype=torch.float16)), ["k", "dtype of q, torch.float32", "torch.float16"]),
    (call(scale=math.inf), ["scale", "finite", "inf"]),
    (call(scale="small"), ["scale", "finite", "'small'"]),
    (call(causal="no"), ["causal must be True, False or None", "'no'"]),
    (call(window=5), ["window must be (left, right)", "5"]),
    (call(window=(1, 2, 3)), ["window must be (left, right)", "(1, 2, 3)"]),
    (call(window=(torch.tensor(1.0), 0)), ["window must be (left, right)", "tensor(1.)"]),
    (call(window=(torch.tensor([1]), 0)), ["window must be (left, right)", "tensor([1])"]),
    (call(window=(torch.tensor(True), 0)), ["window must be (left, right)", "tensor(True)"]),
    (call(window=(1.5, 0)), ["window", "whole number", "1.5"]),
    (call(mask=torch.ones(8, 8)), ["mask must be a dash_attn Mask", "Tensor"]),
    (call(mask=tiles([[1]], 4, 4)), ["does not cover 8 queries x 8 keys"]),
    (call(policy="best"), ["policy must be auto", "fa3", "'best'"]),
    (call(policy=3), ["policy must be auto", "got 3"]),
    (call(policy="shift:wide"), ["policy", "shift:wide", "whole number"]),
    (call(policy="shift:²"), ["policy", "shift:²", "whole number"]),
    (call(cu_seqlens=[0, 8]), ["cu_seqlens goes with packed", "(2, 8, 4, 16)"]),
    (call(cu_seqlens_k=[0, 8]), ["cu_seqlens_k", "without cu_seqlens"]),
    (packed(), ["q of three dimensions, (8, 4, 16), needs cu_seqlens", "unsqueeze(0)"]),
    (packed(cu_seqlens=torch.tensor([0.0, 8.0])), ["cu_seqlens", "one row of int32", "float32"]),
    (packed(cu_seqlens=torch.tensor([0, 8])), ["cu_seqlens", "one row of int32", "torch.int64", ".to(torch.int32)"]),
    (packed(cu_seqlens=cu([[0, 8]])), ["cu_seqlens", "one row", "(1, 2)"]),
    (packed(cu_seqlens=cu([0, 8]).to("meta")), ["cu_seqlens", "device of q, cpu", "meta"]),
    (packed(cu_seqlens=cu([0, 8]), cu_seqlens_k=torch.tensor([0, 8])), ["cu_seqlens_k", "int32", "torch.int64"]),
    (packed(cu_seqlens=cu([0, 5, 3, 8])), ["cu_seqlens", "never decrease", "[0, 5, 3, 8]"]),
    (packed(cu_seqlens=[0.0, 8.0]), ["cu_seqlens", "list of whole numbers", "[0.0, 8.0]"]),
    (packed(cu_seqlens=8), ["cu_seqlens", "list of whole numbers", "got 8"]),
    (packed(cu_seqlens=[0, 5, 3, 8]), ["cu_seqlens", "never decrease", "[0, 5, 3, 8]"]),
    (packed(cu_seqlens=[0, 5]), ["cu_seqlens", "end with the 8 tokens", "[0, 5]"]),
    (packed(cu_seqlens=[1, 8]), ["cu_seqlens", "begin with 0", "[1, 8]"]),
    (packed(cu_seqlens=[0]), ["cu_seqlens", "got [0]"]),
    (
        packed(cu_seqlens=[0, 3, 8], mask=tiles([[1]], 8, 8)),
        ["mask has tiles", "cu_seqlens", "each document its own call"],
    ),
    (
        packed(cu_seqlens=[0, 3, 8], mask=PREFIX),
        ["mask has intervals row by row", "cu_seqlens", "each document its own call"],
    ),
    (packed(cu_seqlens=[0, 8], cu_seqlens_k=[0, 4, 8]), ["cu_seqlens_k", "as many sequences", "1", "2"]),
    (packed(cu_seqlens=[0, 8], cu_seqlens_k=[0, 9]), ["cu_seqlens_k", "8 tokens", "[0, 9]"]),
    (packed(cu_seqlens=[0, 8], k=zeros(9, 2, 16), v=zeros(9, 2, 16)), ["cu_seqlens_k is needed", "8", "9"]),
]


def gradients_of(**changes: Any) -> dict[str, Any]:
    return call(dout=zeros(*Q), out=zeros(*Q), lse=zeros(2, 4, 8), **changes)


REFUSED_BACKWARD: list[tuple[dict[str, Any], list[str]]] = [
    (gradients_of() | {"dout": zeros(2, 8, 4, 8)}, ["dout must have the shape of q", "(2, 8, 4, 8)"]),
    (gradients_of() | {"out": zeros(*Q, dtype=torch.float16)}, ["out must have the dtype of q", "torch.float16"]),
    (gradients_of() | {"out": None}, ["out must be a torch.Tensor", "NoneType"]),
    (gradients_of() | {"lse": zeros(2, 8, 4)}, ["lse must be (batch, heads, seqlen) = (2, 4, 8)", "(2, 8, 4)"]),
    (gradients_of() | {"lse": zeros(2, 4, 8, dtype=torch.float64)}, ["lse", "torch.float32", "torch.float64"]),
    (gradients_of(dq=zeros(2, 8, 2, 16)), ["dq must have the shape of q"]),
    (gradients_of(dk=zeros(*K, dtype=torch.bfloat16)), ["dk must have the dtype of k"]),
    (gradients_of(dv=3), ["dv must be a torch.Tensor", "int"]),
    (gradients_of(dq=zeros(*Q, device="meta")), ["dq must have the device of q, cpu", "meta"]),
    (gradients_of(dq=zeros(1, 8, 4, 16).expand(*Q)), ["dq must have a place for every element", "(0, 64, 16, 1)"]),
    (gradients_of() | {"dout": zeros(*Q, device="meta")}, ["dout must have the device of q, cpu", "meta"]),
    (gradients_of() | {"lse": zeros(2, 4, 8, device="meta")}, ["lse must be", "on cpu", "on meta"]),
    (gradients_of() | {"lse": zeros(2, 4, 8, 1)}, ["lse must be (batch, heads, seqlen) = (2, 4, 8)", "(2, 4, 8, 1)"]),
    (gradients_of(deterministic=1), ["deterministic must be True, False or None", "got 1"]),
    (gradients_of(sm_margin=-1), ["sm_margin", "from 0", "-1"]),
    (gradients_of(sm_margin=True), ["sm_margin", "whole number", "True"]),
    (gradients_of(policy="best"), ["policy must be auto"]),
    (gradients_of(cu_seqlens_q=[0, 8]), ["cu_seqlens_q goes with packed"]),
    (
        packed(dout=zeros(*PACKED), out=zeros(*PACKED), lse=zeros(8, 4), cu_seqlens_q=[0, 8]),
        ["lse must be (heads, tokens) = (4, 8)", "(8, 4)"],
    ),
    (gradients_of(q=zeros(*Q, dtype=torch.float64)), ["q", "torch.float64"]),
    (gradients_of(dropout=0.1), ["dropout is 0.1 and seed is None", "seed of the forward"]),
    (gradients_of(dlse=zeros(2, 8, 4)), ["dlse must be (batch, heads, seqlen) = (2, 4, 8)", "(2, 8, 4)"]),
    (gradients_of(dsinks=zeros(4)), ["dsinks was given without sinks"]),
    (gradients_of(sinks=zeros(4), dsinks=zeros(3)), ["dsinks must have the shape of sinks", "(3,)"]),
    (gradients_of(v=zeros(2, 8, 2, 8)), ["out must have the shape of q with the head dim of v", "(2, 8, 4, 8)"]),
]

SEEDS = "seed must be a whole number from 0 to 2**63 - 1"
REFUSED_SEEDS: list[tuple[dict[str, Any], list[str]]] = [
    (call(dropout=0.1, seed=-1), [SEEDS, "got -1"]),
    (call(dropout=0.1, seed=2**63), [SEEDS]),
    (call(dropout=0.1, seed=0.5), [SEEDS, "got 0.5"]),
    (call(dropout=0.1, seed=[1, 0.5]), [SEEDS, "[1, 0.5]"]),
    (call(dropout=0.1, seed=[1, 2, 3]), ["one for each of the 2 sequences", "got 3 numbers"]),
    (call(dropout=0.1, seed=torch.zeros(2)), ["seed must be int64", "torch.float32"]),
]


# Of the functions with FlashAttention's arguments; what both have in common with attention is above.
REFUSED_FLASH: list[tuple[dict[str, Any], list[str]]] = [
    (call(alibi_slopes=zeros(4)), ["alibi_slopes was given (a tensor)", "flex_attention"]),
]


def varlen(**changes: Any) -> dict[str, Any]:
    return packed(cu_seqlens_q=[0, 3, 8], cu_seqlens_k=[0, 5, 8], **changes)


REFUSED_VARLEN: list[tuple[dict[str, Any], list[str]]] = [
    (varlen(seqused_q=[3]), ["seqused_q", "each of the 2 sequences", "got 1"]),
    (varlen(seqused_k=cu([1, 2, 3])), ["seqused_k", "each of the 2 sequences", "got 3"]),
    (varlen(seqused_q=[4, 5]), ["seqused_q", "length of its sequence", "got 4 for sequence 0 of length 3"]),
    (varlen(seqused_k=cu([5, -1])), ["seqused_k", "from 0", "got -1 for sequence 1 of length 3"]),
    (varlen(seqused_k=[1.0, 2.0]), ["seqused_k", "list of whole numbers", "[1.0, 2.0]"]),
    (varlen(seqused_q=2), ["seqused_q", "list of whole numbers", "got 2"]),
    (varlen(seqused_q=torch.tensor([1, 2])), ["seqused_q", "one row of int32", "torch.int64"]),
    (varlen(seqused_k=cu([[1, 2]])), ["seqused_k", "one row", "(1, 2)"]),
    (varlen(seqused_q=cu([1, 2]).to("meta")), ["seqused_q", "device of q, cpu", "meta"]),
    (
        {**call(q=zeros(1, *PACKED), k=zeros(1, *PACKED_K), v=zeros(1, *PACKED_K)), "cu_seqlens_q": None}
        | {"cu_seqlens_k": None, "seqused_q": [8]},
        ["seqused_q was given without cu_seqlens_q"],
    ),
]


def message_of(function: Callable[..., Any], arguments: dict[str, Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        function(**arguments)
    return str(caught.value)


ROWS = [
    *((function, *row, ValueError) for row in REFUSED for function in (attention, explain)),
    (attention, call(deterministic="yes"), ["deterministic must be True, False or None", "'yes'"], ValueError),
    *((attention, *row, ValueError) for row in REFUSED_SEEDS),
    *((backward, *row, ValueError) for row in REFUSED_BACKWARD),
    *((flash_attn_func, *row, NotImplementedError) for row in REFUSED_FLASH),
    (flash_attn_func, call(learnable_sink=zeros(3)), ["learnable_sink must have one number", "(3,)"], ValueError),
    *((flash_attn_varlen_func, *row, ValueError) for row in REFUSED_VARLEN),
]


@pytest.mark.parametrize(("function", "arguments", "words", "kind"), ROWS, ids=lambda value: None)
def test_refused(
    function: Callable[..., Any], arguments: dict[str, Any], words: list[str], kind: type[Exception]
) -> None:
    message = message_of(function, arguments, kind)
    assert all(word in message for word in words), message


def test_policy_that_does_not_apply_is_refused_in_the_forward() -> None:
    q, k, v = (torch.zeros(1, 600, 2, 16, requires_grad=True) for _ in range(3))
    message = message_of(attention, {"q": q, "k": k, "v": v, "causal": True, "policy": "shift"})
    assert "'shift' needs a mask without empty tiles" in message and "symmetric_shift" in message
    message = message_of(attention, {"q": q, "k": k, "v": v, "policy": "fa3:4"})
    assert "width" in message


def test_other_devices_name_the_way_out() -> None:
    with pytest.raises(NotImplementedError, match=r"on cpu and cuda.*\.cpu\(\)"):
        backend_for(torch.device("meta"))


def test_other_gpus_name_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(NotImplementedError, match=r"older GPU.*8\.0.*Hopper.*\.cpu\(\)"):
        backend_for(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("dash_attn.backends.sm90.backend.find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"dash-attn\[cuda\]"):
        backend_for(torch.device("cuda"))


@pytest.mark.parametrize(
    ("dim", "dtype", "says"),
    [
        (84, "bfloat16", "head dim 84.*multiples of 8 up to 128; pad"),
        (136, "bfloat16", "head dim 136.*scaled_dot_product"),
        (64, "float32", "float32"),
    ],
)
def test_what_the_kernel_lacks_is_refused(dim: int, dtype: str, says: str) -> None:
    with pytest.raises(NotImplementedError, match=says):
        config_of(Problem(1, 1, 1, 8, 8, dim, dtype))


def test_more_sequences_than_a_launch_takes_are_refused() -> None:
    config_of(Problem(32767, 1, 1, 8, 8, 64, "bfloat16"))
    with pytest.raises(NotImplementedError, match=r"batch size 32768.*up to 32767; give it parts"):
        config_of(Problem(32768, 1, 1, 8, 8, 64, "bfloat16"))


def test_more_heads_than_a_launch_takes_are_refused() -> None:
    config_of(Problem(1, 65535, 1, 8, 8, 64, "bfloat16"))
    with pytest.raises(NotImplementedError, match=r"65536 heads.*up to 65535; give it parts"):
        config_of(Problem(1, 65536, 1, 8, 8, 64, "bfloat16"))


@pytest.mark.parametrize("version", ["2.8.0", "2.8.1+cu128", "1.13.1"])
def test_a_torch_too_old_is_named(version: str) -> None:
    assert f"torch {version} is too old" in message_of(check_torch, {"version": version}, NotImplementedError)


@pytest.mark.parametrize("version", ["2.9.0", "2.10.0a0+git1234567", "2.13.0+cpu", "3.0"])
def test_a_torch_new_enough(version: str) -> None:
    check_torch(version)


def test_what_bulk_loads_cannot_read_is_copied() -> None:
    rows = torch.zeros(2, 8, 4, 64, dtype=torch.bfloat16)
    wide = torch.zeros(2, 8, 4, 65, dtype=torch.bfloat16)
    for fits in (rows, rows.transpose(1, 2), rows[:, ::2], torch.zeros(2, 8, 3, 4, 64).unbind(2)[1]):
        assert aligned(fits) is fits
    for cannot in (wide[..., :64], rows.flatten()[1:65].view(1, 1, 1, 64), rows.mT, rows[:1].expand(2, -1, -1, -1)):
        copy = aligned(cannot)
        assert copy is not cannot and copy.is_contiguous() and copy.data_ptr() % 16 == 0


def test_other_devices_are_refused_by_attention() -> None:
    tensors = {name: zeros(1, 8, 2, 16, device="meta") for name in ("q", "k", "v")}
    assert "q is on meta" in message_of(attention, tensors, NotImplementedError)


def test_determinism_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    assert wants_determinism(None)
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    assert wants_determinism(None) and not wants_determinism(False)
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    assert not wants_determinism(None) and wants_determinism(True)
    try:
        for warn_only in (False, True):  # either way torch was asked
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            assert wants_determinism(None) and not wants_determinism(False)
    finally:
        torch.use_deterministic_algorithms(False)
