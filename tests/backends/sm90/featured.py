"""Attention with features from its definition, in float64, under autograd.

It is independent of the reference in dash_attn/tools/bench/operands.py: whole scores in place of bands, and gradients
of autograd in place of formulas. test_features.py compares the two. It has no dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dash_attn.backends import Gradients
from dash_attn.backends.base import Extras
from dash_attn.problem import Problem

NOTHING = Extras()


def attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen, heads, dim) and lse (batch, heads, seqlen). A row without keys and sink has 0 and -inf."""
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(problem.group, 1) for x in (k, v))
    hidden = ~torch.from_numpy(problem.mask.dense(problem.len_q, problem.len_k)).to(q.device)
    scores, cap = q @ k.mT * problem.softmax_scale, problem.features.softcap
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(*scores.shape[:2], scores.shape[2], 1)
        scores = torch.cat([scores, column], -1)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    lse = scores.masked_fill(blind, 0.0).logsumexp(-1)
    p = (scores - lse[..., None]).exp().masked_fill(blind, 0.0)[..., : problem.len_k]
    return (p @ v).transpose(1, 2), lse.masked_fill(blind.squeeze(-1), -torch.inf)


def gradients(problem: Problem, dout: Tensor, qkv: tuple[Tensor, ...], extras: Extras = NOTHING) -> Gradients:
    """Gradients of q, k and v for the gradients of out and, if given, of lse."""
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    out, lse = attend(problem, *leaves, extras.sinks)
    outputs, given = [out], [dout.double()]
    if extras.dlse is not None:
        seen = lse != -torch.inf
        outputs, given = [*outputs, lse.masked_fill(~seen, 0.0)], [*given, extras.dlse.double() * seen]
    return Gradients(*torch.autograd.grad(outputs, leaves, given))
