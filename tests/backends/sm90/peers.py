"""Gradients by other libraries from the same inputs, to hold ours against."""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import accumulate, pairwise

import torch

from dash_attn.backends import Gradients
from tests.backends.sm90.cases import Case

# Read when flash_attn is imported: its kernels are compiled once per machine and not once per process.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def gradients(case: Case) -> tuple[str, Gradients]:
    """By the first peer that can: FlashAttention-4, torch's flash kernels, or plain 16-bit operations of torch."""
    if fa4_runs(case) and finite(grads := fa4(case)):
        return "fa4", grads
    if case.problem.mask.tiles is None and finite(grads := torch_flash(case)):
        return "torch's flash", grads
    return "eager", eager(case)


def finite(grads: Gradients) -> bool:
    return all(bool(torch.isfinite(g).all()) for g in grads)


def fa4_runs(case: Case) -> bool:
    """Few of its kernels, since each kind of mask, head dim, group and (for one tile) length is compiled anew."""
    p = case.problem
    plain = p.mask.is_full or p.mask.is_causal
    few = p.dtype == "bfloat16" and p.group in (1, 4) and min(p.len_q, p.len_k) > 128
    return plain and few and find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def fa4(case: Case) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    dout, q, k, v, out, lse = case.operands
    given = {"softmax_scale": case.problem.softmax_scale, "causal": case.problem.mask.is_causal}
    return Gradients(*_flash_attn_bwd(q, k, v, out, dout, lse, **given)[:3])


def torch_flash(case: Case) -> Gradients:
    """As packed sequences, which is the way that takes documents and windows; out and lse by its own forward."""
    problem, (dout, q, k, v, *_) = case.problem, case.operands
    documents, left, right = problem.mask.documents, problem.mask.left, problem.mask.right
    ends = [[0, n] for n in (problem.len_q, problem.len_k)]
    if documents is not None:
        ends = [list(documents.cu_q), list(documents.cu_k)]
    sizes = [[b - a for a, b in pairwise(cu)] * problem.batch for cu in ends]
    starts = [torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=q.device) for each in sizes]
    packed = [x.flatten(0, 1) for x in (dout, q, k, v)]
    common = (*starts, *(max(each) for each in sizes), 0.0, right == 0)
    keywords = {
        "scale": problem.softmax_scale,
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
    }
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(*packed[1:], *common, False, **keywords)
    grads = torch.ops.aten._flash_attention_backward(*packed, out, lse, *common, state, unused, **keywords)
    return Gradients(*(g.view_as(x) for g, x in zip(grads, (q, k, v), strict=True)))


def eager(case: Case) -> Gradients:
    """softmax(q k^T) v by torch's operations in the inputs' type, softmax in float32, under autograd."""
    problem, (dout, *leaves) = case.problem, case.operands[:4]
    leaves = [x.detach().requires_grad_() for x in leaves]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(problem.group, 1) for x in (k, v))
    allowed = torch.from_numpy(problem.mask.dense(problem.len_q, problem.len_k)).to(q.device)
    scores = (q @ k.mT).float() * problem.softmax_scale
    p = scores.masked_fill(~allowed, -1e30).softmax(-1) * allowed  # a row without keys gives 0, not NaN
    return Gradients(*torch.autograd.grad((p.to(q.dtype) @ v).transpose(1, 2), leaves, dout))
