"""backward: the gradients alone, for callers that keep their own forward."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_attn.api.arguments import (
    Boundaries,
    Window,
    check_flag,
    check_like,
    check_lse,
    check_margin,
    check_policy,
    check_room,
    problem_of,
    wants_determinism,
)
from dash_attn.api.calls import recall
from dash_attn.backends import Backward, Options, backend_for
from dash_attn.backends.base import Gradients, Operands
from dash_attn.plan import plan
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

    def checked() -> Backward:
        problem = problem_of(
            q,
            k,
            v,
            causal=causal,
            window=window,
            boundaries={"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k},
            mask=mask,
            scale=scale,
        )
        check_policy(policy)
        check_like("out", out, "q", q)
        check_like("dout", dout, "q", q)
        check_lse(lse, q)
        check_margin(sm_margin)
        check_flag("deterministic", deterministic)
        for name, given, model_name, model in (("dq", dq, "q", q), ("dk", dk, "k", k), ("dv", dv, "v", v)):
            if given is not None:
                check_room(name, given, model_name, model)
        backend = backend_for(q.device)
        planned = plan(problem, backend.tile_shape(problem), policy)
        return backend.bound(planned, Options(ordered, sm_margin), tensors)

    ordered = wants_determinism(deterministic)
    tensors = [dout, q, k, v, out, lse]
    tensors += [x for x in (dq, dk, dv) if x is not None]
    which = (dq is None, dk is None, dv is None)
    sides = window if isinstance(window, tuple) else ()
    gradients = recall(
        tensors,
        (cu_seqlens_q, cu_seqlens_k),
        (causal, window, *sides, mask, scale, policy, deterministic, ordered, sm_margin, which),
        checked,
    )
    into = Gradients(
        torch.empty_like(q, memory_format=torch.contiguous_format) if dq is None else dq,
        torch.empty_like(k, memory_format=torch.contiguous_format) if dk is None else dk,
        torch.empty_like(v, memory_format=torch.contiguous_format) if dv is None else dv,
    )
    operands, target = Operands(dout, q, k, v, out, lse), into
    if q.ndim == 3:
        # Views, so that what is written to them is written to what the caller gave.
        operands, target = Operands(*(x.unsqueeze(0) for x in operands)), Gradients(*(x.unsqueeze(0) for x in into))
    gradients(operands, target)
    return into
