"""What the tests of the CPU backend and of the API compare with: float64, torch's own attention, and bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dash_attn.backends import Gradients, Operands, cpu
from dash_attn.plan import Plan, placement
from dash_attn.problem import Problem

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Answer:
    """Result, log-sum-exp and gradients of q, k, v."""

    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...]


def inputs(problem: Problem, seed: int = 0) -> tuple[Tensor, ...]:
    """Random q, k, v and dout."""
    generator = torch.Generator().manual_seed(seed)
    q = (problem.batch, problem.len_q, problem.heads_q, problem.dim)
    kv = (problem.batch, problem.len_k, problem.heads_kv, problem.dim)
    return tuple(torch.randn(shape, generator=generator).to(DTYPES[problem.dtype]) for shape in (q, kv, kv, q))


def exact(problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Answer:
    """All in float64, from the definition."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves[0], *(x.repeat_interleave(problem.group, 2) for x in leaves[1:])
    allowed = torch.from_numpy(problem.mask.dense(problem.len_q, problem.len_k))
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * problem.softmax_scale).masked_fill(~allowed, -math.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp().masked_fill(~allowed, 0)
    out = torch.einsum("bhqk,bkhd->bqhd", p, v)
    return Answer(out.detach(), lse.detach(), torch.autograd.grad(out, leaves, dout.double()))


def by_torch(problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Gradients by torch's own attention in the dtype of the inputs."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    heads_first = (x.repeat_interleave(problem.heads_q // x.shape[2], 2).transpose(1, 2) for x in leaves)
    allowed = torch.from_numpy(problem.mask.dense(problem.len_q, problem.len_k))
    out = scaled_dot_product_attention(*heads_first, attn_mask=allowed, scale=problem.softmax_scale)
    return torch.autograd.grad(out.transpose(1, 2), leaves, dout)


def run(planned: Plan, operands: Operands, *, workers: int = 1, **how: object) -> Gradients:
    """The backward on at least `workers` workers, into tensors full of NaN."""
    into = Gradients(*(torch.full_like(x, math.nan) for x in (operands.q, operands.k, operands.v)))
    placed = placement(planned, max(workers, planned.co_resident))
    return cpu.backward(planned.problem, planned.program, placed, operands, into, **how)


def operands(problem: Problem, seed: int = 0) -> Operands:
    q, k, v, dout = inputs(problem, seed)
    return Operands(dout, q, k, v, *cpu.forward(problem, q, k, v))


def difference(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> str:
    """'' if all bits are equal, else the first coordinate that differs and its values."""
    for name, x, y in zip(("dq", "dk", "dv"), a, b, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        whole = torch.int32 if x.dtype == torch.float32 else torch.int16
        unequal = (x.contiguous().view(whole) != y.contiguous().view(whole)).nonzero()
        if len(unequal):
            at = tuple(unequal[0].tolist())
            return f"{name}{list(at)}: {x[at].item()!r} and {y[at].item()!r}, {len(unequal)} of {x.numel()} differ"
    return ""


def error(got: Tensor, expected: Tensor) -> float:
    """Root of the mean square error; infinite if anything is not a number."""
    square = (got.double() - expected).square().mean() if got.numel() else torch.zeros(())
    return math.inf if square.isnan() else float(square.sqrt())
