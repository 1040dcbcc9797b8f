"""backward: the gradients alone, for callers that keep their own forward."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_attn.api.arguments import (
    Arguments,
    Window,
    check_like,
    check_lse,
    check_room,
    problem_of,
    wants_determinism,
)
from dash_attn.api.calls import Boundaries, recall, traits
from dash_attn.backends import Gradients, Operands, Options
from dash_attn.prepare import Prepared, prepare
from dash_attn.problem import Mask


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
    policy: str = "auto",
    deterministic: bool | None = True,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    sm_margin: int = 0,
) -> Gradients:
    """(dq, dk, dv) of `attention`, from its inputs, its result and the gradient of its result.

    `lse` is float32, natural logarithm, (batch, heads, seqlen) or packed (heads, tokens): what FlashAttention's and
    torch's flash forward give. dq, dk and dv are written in place if given, and must not overlap the other tensors: dq
    serves as a workspace meanwhile. `sm_margin` processors of a GPU are left to others; it never changes the bits.
    cu_seqlens on a GPU are waited for, lists and tensors on the CPU are not.
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

    asked = Arguments(causal, window, cu_seqlens_q, cu_seqlens_k, mask, scale, policy, deterministic, sm_margin)
    operands, given = Operands(dout, q, k, v, out, lse), (dq, dk, dv)
    try:
        rooms = tuple([None if x is None else (traits(x), x.stride()) for x in given])
        key = ("backward", *map(traits, operands), rooms, asked.key())
    except (AttributeError, TypeError, RuntimeError):  # not a dense tensor, or not hashable: the checks say which
        prepared = checked()
    else:
        prepared = recall(key, checked)
    into = Gradients(
        torch.empty_like(q, memory_format=torch.contiguous_format) if dq is None else dq,
        torch.empty_like(k, memory_format=torch.contiguous_format) if dk is None else dk,
        torch.empty_like(v, memory_format=torch.contiguous_format) if dv is None else dv,
    )
    return prepared.backward(operands, into)
