"""backward: the gradients alone, for callers with a forward of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_attn.api.arguments import (
    FLASH_NAMES,
    Arguments,
    Window,
    check_like,
    check_lse,
    check_room,
    problem_of,
    wants_determinism,
)
from dash_attn.api.calls import Boundaries, recall, traits
from dash_attn.api.overlap import refuse_overlap
from dash_attn.backends import Gradients, Operands, Options
from dash_attn.prepare import Prepared, prepare
from dash_attn.problem import Mask
from dash_attn.program import Program


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    cu_seqlens_q: Boundaries | None = None,
    cu_seqlens_k: Boundaries | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    policy: str | Program = "auto",
    panels: int = 1,
    deterministic: bool | None = True,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    sm_margin: int = 0,
) -> Gradients:
    """(dq, dk, dv) of `attention`, from its inputs, its output and the gradient of its output.

    lse         log-sum-exp as FlashAttention and torch give it: float32, natural logarithm, (batch, heads, seqlen) or
                packed (heads, tokens)
    dq, dk, dv  tensors for the results. If one of them shares memory with another tensor of the call, it is an error,
                because dq also serves as a workspace. Slices of one tensor that share no element are fine
    sm_margin   SMs of a GPU that the backward leaves to other kernels; it never changes the bits

    The other arguments are as in `attention`. cu_seqlens on a GPU makes the host wait for the GPU.
    """

    def checked() -> Prepared:
        problem = problem_of(q, k, v, asked)
        check_like("out", out, "q", q)
        check_like("dout", dout, "q", q)
        check_lse(lse, q)
        for name, given, model_name, model in (("dq", dq, "q", q), ("dk", dk, "k", k), ("dv", dv, "v", v)):
            if given is not None:
                check_room(name, given, model_name, model)
        return prepare(problem, policy, Options(wants_determinism(deterministic), sm_margin), q.device)

    sides = (cu_seqlens_q, cu_seqlens_k)
    plain = (causal, window, *sides, mask, scale, policy, deterministic, sm_margin, FLASH_NAMES)
    asked = Arguments(*plain, panels=panels)
    operands, given = Operands(dout, q, k, v, out, lse), (dq, dk, dv)
    try:
        rooms = tuple([None if x is None else (traits(x), x.stride()) for x in given])
        key = ("backward", *map(traits, operands), rooms, asked.key())
    except (AttributeError, TypeError, RuntimeError):  # not a dense tensor, or not hashable: the checks say which
        prepared = checked()
    else:
        prepared = recall(key, checked)
    if dq is dk is dv is None:
        return prepared.backward(operands)
    # Addresses are no part of the key, so every call with tensors for the results is checked.
    named = zip(Gradients._fields, given, strict=True)
    refuse_overlap([(name, x) for name, x in named if x is not None], list(operands._asdict().items()))
    models = zip(given, (q, k, v), strict=True)
    into = [torch.empty_like(x, memory_format=torch.contiguous_format) if room is None else room for room, x in models]
    return prepared.backward(operands, Gradients(*into))
