"""Random inputs of a problem, a real forward, and float64 gradients of a part of it."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_attn.backends import backend_for
from dash_attn.backends.base import Gradients, Operands
from dash_attn.problem import Problem

CHUNK = 2**25  # scores of the float64 reference that live at once
TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-5}  # relative, of a gradient


def draw(problem: Problem, device: torch.device, seed: int = 0) -> Operands:
    """Normally distributed q, k, v and dout, with out and lse of a forward."""
    generator = torch.Generator(device).manual_seed(seed)

    def some(length: int, heads: int) -> Tensor:
        shape = (problem.batch, length, heads, problem.dim)
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, problem.dtype))

    q, dout = some(problem.len_q, problem.heads_q), some(problem.len_q, problem.heads_q)
    k, v = some(problem.len_k, problem.heads_kv), some(problem.len_k, problem.heads_kv)
    return Operands(dout, q, k, v, *forward(problem, q, k, v))


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, from the library that dash_attn.attention would take here."""
    out, lse = backend_for(q.device).forward(problem, q, k, v)
    return out.contiguous(), lse.contiguous()


def input_sets(problem: Problem, device: torch.device) -> list[Operands]:
    """So many that the cache holds none of the last call's inputs when the next call begins: at least two."""
    first = draw(problem, device)
    size = sum(x.numel() * x.element_size() for x in first)
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return [first, *(draw(problem, device, seed) for seed in range(1, min(8, 2 + cache // size)))]


@torch.no_grad()
def exact(problem: Problem, operands: Operands) -> Gradients:
    """Gradients of the last key/value head of the last sequence in float64: dq (len_q, group, dim), dk and dv
    (len_k, dim). In bands of queries, so that it stays cheap at any length."""
    if problem.mask.tiles is not None:
        raise NotImplementedError("the float64 reference has no tile masks")
    batch, kv, group = problem.batch - 1, problem.heads_kv - 1, problem.group
    scale, device = problem.softmax_scale, operands.q.device
    k, v = operands.k[batch, :, kv].double(), operands.v[batch, :, kv].double()
    dq = torch.zeros(problem.len_q, group, problem.dim, dtype=torch.float64, device=device)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    lo, hi = (torch.from_numpy(x).to(device) for x in problem.mask.intervals(problem.len_q, problem.len_k))
    column = torch.arange(problem.len_k, device=device)
    rows = max(16, CHUNK // max(1, problem.len_k))
    for begin in range(0, problem.len_q, rows):
        band = slice(begin, begin + rows)
        end = int(hi[band].max())
        hidden = (column[:end] < lo[band, None]) | (column[:end] >= hi[band, None])
        for i in range(group):
            q, dout = (x[batch, band, kv * group + i].double() for x in (operands.q, operands.dout))
            p = torch.nan_to_num((q @ k[:end].T * scale).masked_fill_(hidden, -torch.inf).softmax(-1))
            ds = p * (dout @ v[:end].T - (p @ v[:end] * dout).sum(-1, keepdim=True))
            dq[band, i] = ds @ k[:end] * scale
            dk[:end] += ds.T @ q * scale
            dv[:end] += p.T @ dout
    return Gradients(dq, dk, dv)


def error(problem: Problem, got: tuple[Tensor, ...], want: Gradients) -> float:
    """Largest relative deviation of a gradient from `exact`; not a number if any element anywhere is none."""
    if not all(bool(torch.isfinite(x).all()) for x in got):
        return float("nan")
    batch, kv, group = problem.batch - 1, problem.heads_kv - 1, problem.group
    heads = slice(kv * group, (kv + 1) * group)
    parts = (got[0][batch, :, heads], got[1][batch, :, kv], got[2][batch, :, kv])
    return max(float((a.double() - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(parts, want, strict=True))
