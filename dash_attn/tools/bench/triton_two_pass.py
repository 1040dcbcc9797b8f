"""A backward in two passes, in Triton: one kernel computes dK and dV, another dQ. No two workers add to one tile.

This is the simple way to a deterministic backward. It computes S and dP twice, so it has seven products instead of
five. It stands for the baseline that the paper takes from Triton's tutorial. It takes full and causal masks, any
length, and GQA. Tensors are contiguous (batch, seqlen, heads, dim), lse and delta (batch, heads, seqlen).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dash_attn.backends.base import Gradients, Operands
from dash_attn.problem import Problem

OWN, OTHER = 128, 64  # rows of a tile that a program owns, and of those it loops over
WARPS, STAGES = 8, 2


@triton.jit
def _delta(tensors, heads, length, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """delta = rowsum(dO * O), a row each of (batch, heads, seqlen)."""
    plane, d = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_D)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = ((plane // heads * length + row[:, None]) * heads + plane % heads) * DIM + d[None, :]
    inside = (row[:, None] < length) & (d[None, :] < DIM)
    out = tl.load(tensors[0] + at, inside, 0.0).to(tl.float32)
    dout = tl.load(tensors[1] + at, inside, 0.0).to(tl.float32)
    tl.store(tensors[2] + plane * length + row, tl.sum(out * dout, 1), row < length)


@triton.jit
def _dkdv(  # type: ignore[no-untyped-def]
    tensors,
    sizes,
    scale,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A program keeps a tile of keys and adds over the queries of every head of its group, in ascending order."""
    len_q, len_k, heads_q, heads_kv = sizes[0], sizes[1], sizes[2], sizes[3]
    batch, head_kv = tl.program_id(1).to(tl.int64) // heads_kv, tl.program_id(1) % heads_kv
    # Offsets within a sequence are 32 bits wide: half the registers.
    of_q, of_k = batch * len_q * heads_q * DIM, batch * len_k * heads_kv * DIM
    q_at, k_at, v_at, do_at = tensors[0] + of_q, tensors[1] + of_k, tensors[2] + of_k, tensors[3] + of_q
    lse_at, delta_at, dk_at, dv_at = tensors[4], tensors[5], tensors[6] + of_k, tensors[7] + of_k
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
    tensors,
    sizes,
    scale,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program keeps a tile of queries of one head and adds over its keys, in ascending order."""
    len_q, len_k, heads_q, heads_kv = sizes[0], sizes[1], sizes[2], sizes[3]
    plane = tl.program_id(1).to(tl.int64)
    batch, head = plane // heads_q, tl.program_id(1) % heads_q
    head_kv = head // (heads_q // heads_kv)
    of_q, of_k = batch * len_q * heads_q * DIM, batch * len_k * heads_kv * DIM
    q_at, k_at, v_at, do_at = tensors[0] + of_q, tensors[1] + of_k, tensors[2] + of_k, tensors[3] + of_q
    lse_at, delta_at, dq_at = tensors[4], tensors[5], tensors[6] + of_q
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
    dim, wide = problem.dim, triton.next_power_of_2(problem.dim)
    heads, planes = problem.heads_q, problem.batch * problem.heads_q
    sizes = (problem.len_q, problem.len_k, heads, problem.heads_kv)
    fixed = (problem.softmax_scale, problem.mask.is_causal, dim, wide)
    tune = {"num_warps": WARPS, "num_stages": STAGES}
    rows, keys = triton.cdiv(problem.len_q, OWN), triton.cdiv(problem.len_k, OWN)
    _delta[rows, planes]((out, dout, delta), heads, problem.len_q, dim, wide, OWN)
    inputs = (q, k, v, dout, lse, delta)
    # dK and dV of a tile fill the registers above head dim 64: with narrower steps nothing spills.
    step = OTHER if dim <= 64 else OTHER // 2
    into = (grads.dk, grads.dv)
    _dkdv[keys, problem.batch * problem.heads_kv]((*inputs, *into), sizes, *fixed, OWN, step, **tune)
    _dq[rows, planes]((*inputs, grads.dq), sizes, *fixed, OWN, OTHER, **tune)
    return grads
