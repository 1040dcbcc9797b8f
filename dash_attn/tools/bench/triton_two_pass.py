"""A backward in two passes, in Triton: one kernel computes dK and dV, another dQ. No two workers add to one tile.

This is the simple way to a deterministic backward. It computes S and dP twice, so it has seven products instead of
five. It stands for the baseline that the paper takes from Triton's tutorial. It takes full and causal masks, any
length, and GQA. Tensors are contiguous (batch, seqlen, heads, dim), lse and delta (batch, heads, seqlen).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dash_attn.backends.base import Gradients, Operands
from dash_attn.problem import Problem

OWN, OTHER = 128, 64  # rows of a tile that a program owns, and of those it loops over
WARPS, STAGES = 8, 2


class Pointers(NamedTuple):
    """The tensors of a backward; in a kernel, pointers to them."""

    q: Any
    k: Any
    v: Any
    out: Any
    dout: Any
    lse: Any
    delta: Any
    dq: Any
    dk: Any
    dv: Any


class Scalars(NamedTuple):
    """The numbers of a problem that differ between calls of one compiled kernel."""

    len_q: Any
    len_k: Any
    heads_q: Any
    heads_kv: Any
    scale: Any


@triton.jit
def _delta(pointers, scalars, DIM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """delta = rowsum(dO * O), a row each of (batch, heads, seqlen)."""
    heads, length = scalars.heads_q, scalars.len_q
    plane, d = tl.program_id(1).to(tl.int64), tl.arange(0, triton.next_power_of_2(DIM))
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = ((plane // heads * length + row[:, None]) * heads + plane % heads) * DIM + d[None, :]
    inside = (row[:, None] < length) & (d[None, :] < DIM)
    out = tl.load(pointers.out + at, inside, 0.0).to(tl.float32)
    dout = tl.load(pointers.dout + at, inside, 0.0).to(tl.float32)
    tl.store(pointers.delta + plane * length + row, tl.sum(out * dout, 1), row < length)


@triton.jit
def _dkdv(  # type: ignore[no-untyped-def]
    pointers, scalars, CAUSAL: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr
):
    """A program keeps a tile of keys and adds over the queries of every head of its group, in ascending order."""
    len_q, len_k, scale = scalars.len_q, scalars.len_k, scalars.scale
    heads_q, heads_kv = scalars.heads_q, scalars.heads_kv
    batch, head_kv = tl.program_id(1).to(tl.int64) // heads_kv, tl.program_id(1) % heads_kv
    # Offsets within a sequence are 32 bits wide: half the registers.
    of_q, of_k = batch * len_q * heads_q * DIM, batch * len_k * heads_kv * DIM
    q_at, k_at, v_at, do_at = pointers.q + of_q, pointers.k + of_k, pointers.v + of_k, pointers.dout + of_q
    lse_at, delta_at, dk_at, dv_at = pointers.lse, pointers.delta, pointers.dk + of_k, pointers.dv + of_k
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    first_key = tl.program_id(0) * BLOCK_N
    key, d = first_key + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    kv_offset = (key[:, None] * heads_kv + head_kv) * DIM + d[None, :]
    kv_inside = (key[:, None] < len_k) & (d[None, :] < DIM)
    k = tl.load(k_at + kv_offset, kv_inside, 0.0)
    v = tl.load(v_at + kv_offset, kv_inside, 0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    group = heads_q // heads_kv
    begin = tl.maximum(0, first_key - (len_k - len_q)) // BLOCK_M * BLOCK_M if CAUSAL else 0
    for head in range(head_kv * group, (head_kv + 1) * group):
        plane = batch * heads_q + head
        for first_row in range(begin, len_q, BLOCK_M):
            row = first_row + tl.arange(0, BLOCK_M)
            offset = (row[:, None] * heads_q + head) * DIM + d[None, :]
            inside = (row[:, None] < len_q) & (d[None, :] < DIM)
            q = tl.load(q_at + offset, inside, 0.0)
            dout = tl.load(do_at + offset, inside, 0.0)
            # A row beyond the end has lse = +inf, so that its P is 0.
            lse = tl.load(lse_at + plane * len_q + row, row < len_q, float("inf"))
            delta = tl.load(delta_at + plane * len_q + row, row < len_q, 0.0)
            p = tl.exp2((tl.dot(k, tl.trans(q)) * scale - lse[None, :]) * 1.4426950408889634)
            if CAUSAL:
                p = tl.where(key[:, None] <= row[None, :] + (len_k - len_q), p, 0.0)
            dv += tl.dot(p.to(dout.dtype), dout)
            ds = p * (tl.dot(v, tl.trans(dout)) - delta[None, :])
            dk += tl.dot(ds.to(q.dtype), q)
    tl.store(dk_at + kv_offset, (dk * scale).to(k.dtype), kv_inside)
    tl.store(dv_at + kv_offset, dv.to(k.dtype), kv_inside)


@triton.jit
def _dq(  # type: ignore[no-untyped-def]
    pointers, scalars, CAUSAL: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A program keeps a tile of queries of one head and adds over its keys, in ascending order."""
    len_q, len_k, scale = scalars.len_q, scalars.len_k, scalars.scale
    heads_q, heads_kv = scalars.heads_q, scalars.heads_kv
    plane = tl.program_id(1).to(tl.int64)
    batch, head = plane // heads_q, tl.program_id(1) % heads_q
    head_kv = head // (heads_q // heads_kv)
    of_q, of_k = batch * len_q * heads_q * DIM, batch * len_k * heads_kv * DIM
    q_at, k_at, v_at, do_at = pointers.q + of_q, pointers.k + of_k, pointers.v + of_k, pointers.dout + of_q
    lse_at, delta_at, dq_at = pointers.lse, pointers.delta, pointers.dq + of_q
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    first_row = tl.program_id(0) * BLOCK_M
    row, d = first_row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    offset = (row[:, None] * heads_q + head) * DIM + d[None, :]
    inside = (row[:, None] < len_q) & (d[None, :] < DIM)
    q = tl.load(q_at + offset, inside, 0.0)
    dout = tl.load(do_at + offset, inside, 0.0)
    lse = tl.load(lse_at + plane * len_q + row, row < len_q, float("inf"))
    delta = tl.load(delta_at + plane * len_q + row, row < len_q, 0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = tl.minimum(len_k, first_row + BLOCK_M + (len_k - len_q)) if CAUSAL else len_k
    for first_key in range(0, end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        kv_offset = (key[:, None] * heads_kv + head_kv) * DIM + d[None, :]
        kv_inside = (key[:, None] < len_k) & (d[None, :] < DIM)
        k = tl.load(k_at + kv_offset, kv_inside, 0.0)
        v = tl.load(v_at + kv_offset, kv_inside, 0.0)
        p = tl.exp2((tl.dot(q, tl.trans(k)) * scale - lse[:, None]) * 1.4426950408889634)
        visible = key[None, :] <= row[:, None] + (len_k - len_q) if CAUSAL else key[None, :] < len_k
        p = tl.where(visible, p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v)) - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k)
    tl.store(dq_at + offset, (dq * scale).to(q.dtype), inside)


def backward(problem: Problem, operands: Operands) -> Gradients:
    """dQ, dK, dV in two passes."""
    if not (problem.mask.is_full or problem.mask.is_causal):
        raise NotImplementedError(f"mask {problem.mask}: the two-pass baseline has full and causal only")
    dout, q, k, v, out = (getattr(operands, name).contiguous() for name in ("dout", "q", "k", "v", "out"))
    if max(q[0].numel(), k[0].numel()) >= 2**31:
        raise NotImplementedError(f"q has {tuple(q.shape)}: offsets within a sequence are 32 bits wide here")
    lse = operands.lse.contiguous()
    delta = torch.empty_like(lse)
    grads = Gradients(*(torch.empty_like(x) for x in (q, k, v)))
    pointers = Pointers(q, k, v, out, dout, lse, delta, *grads)
    scalars = Scalars(problem.len_q, problem.len_k, problem.heads_q, problem.heads_kv, problem.softmax_scale)
    dim, planes, causal = problem.dim, problem.batch * problem.heads_q, problem.mask.is_causal
    tune = {"num_warps": WARPS, "num_stages": STAGES}
    rows, keys = triton.cdiv(problem.len_q, OWN), triton.cdiv(problem.len_k, OWN)
    _delta[rows, planes](pointers, scalars, dim, OWN)
    # dK and dV of a tile fill the registers above head dim 64: with narrower steps nothing spills.
    step = OTHER if dim <= 64 else OTHER // 2
    _dkdv[keys, problem.batch * problem.heads_kv](pointers, scalars, causal, dim, OWN, step, **tune)
    _dq[rows, planes](pointers, scalars, causal, dim, OWN, OTHER, **tune)
    return grads
