"""backward: the gradients alone, for callers that keep their own forward."""

from __future__ import annotations

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
from dash_attn.api.backends import Options, backend_for
from dash_attn.cpu import Gradients, Operands
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
    torch's flash forward give. dq, dk and dv are written in place if given. `sm_margin` processors of a GPU are
    left to others; it never changes the bits.
    """
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
    backend = backend_for(q.device)
    into = []
    for name, given, model_name, model in (("dq", dq, "q", q), ("dk", dk, "k", k), ("dv", dv, "v", v)):
        if given is not None:
            check_room(name, given, model_name, model)
        into.append(model.new_empty(model.shape) if given is None else given)
    planned = plan(problem, backend.tile_shape(problem), policy)
    # Of packed tensors views, so that what is written to them is written to what the caller gave.
    tensors = [x if q.ndim == 4 else x.unsqueeze(0) for x in (dout, q, k, v, out, lse, *into)]
    options = Options(wants_determinism(deterministic), sm_margin)
    backend.backward(planned, Operands(*tensors[:6]), Gradients(*tensors[6:]), options)
    return Gradients(*into)
