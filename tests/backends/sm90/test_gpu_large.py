"""Tensors of more than 2^31 elements: make gpu-test"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator

import pytest
import torch

import dash_attn
from dash_attn.backends import Operands
from dash_attn.backends.sm90.workspace import Workspace
from dash_attn.problem import CAUSAL, Problem
from tests.backends.sm90.cases import DEVICE, Case, changed, poison, prepared, room

pytestmark = pytest.mark.gpu

MANY = 2**31


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < 60 * 2**30:
        pytest.skip(f"needs 60 GiB of free GPU memory, there are {free // 2**30}")
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("finish", ["last", "postpass"])
@pytest.mark.parametrize("dim", [64, 128])
def test_queries_and_sums(dim: int, finish: str) -> None:
    """Only the last 384 queries of a row see keys, so that there is little to compute, but far out in every tensor."""
    batch, heads, tokens = 16 * (128 // dim), 8, 384
    short = Problem(batch, heads, heads, tokens, tokens, dim, mask=CAUSAL)
    long = dataclasses.replace(short, len_q=2**17 + tokens)
    near = Case.make(short)
    want = near.run(prepared(short, "fa3", finish=finish))

    def far(x: torch.Tensor, before: float) -> torch.Tensor:
        t = torch.full((batch, long.len_q, heads, dim), before, dtype=x.dtype, device=DEVICE)
        t[:, -tokens:] = x
        return t

    dout, q, k, v, out, lse = near.operands
    blind = torch.full((batch, heads, long.len_q), -torch.inf, device=DEVICE)
    blind[..., -tokens:] = lse
    operands = Operands(far(dout, 0.0), far(q, float("nan")), k, v, far(out, 0.0), blind)
    assert operands.q.numel() > MANY
    launch, into = prepared(long, "fa3", finish=finish).run_backward, room(operands)
    workspace = Workspace.of(launch.cfg, operands.q)
    assert workspace.dq_sum.numel() > MANY
    poison(workspace, into)
    launch(operands, into, workspace=workspace)
    assert int(changed((into.dq[:, -tokens:], into.dk, into.dv), want)) == 0
    assert not bool(into.dq[:, :-tokens].any())


def test_slices_of_one_tensor() -> None:
    """q, k and v side by side in one tensor, and their gradients in another: strides and offsets past 2^31."""
    batch, tokens, heads, dim = 2, 1000, 8, 128
    rows = MANY // (3 * heads * dim) + tokens
    fused, given = (torch.full((batch, rows, 3, heads, dim), 3.0, dtype=torch.bfloat16, device=DEVICE) for _ in "xy")
    assert fused.stride(0) > MANY
    case = Case.make(Problem(batch, heads, heads, tokens, tokens, dim, mask=CAUSAL))
    dout, q, k, v, out, lse = case.operands
    fused[:, -tokens:] = torch.stack([q, k, v], 2)
    want = dash_attn.backward(dout, q, k, v, out, lse, causal=True)
    views, into = fused[:, -tokens:].unbind(2), given[:, -tokens:].unbind(2)
    grads = dash_attn.backward(dout, *views, out, lse, causal=True, dq=into[0], dk=into[1], dv=into[2])
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(grads, into, strict=True))
    assert int(changed(into, want)) == 0
    assert bool((given[:, :-tokens] == 3.0).all())
