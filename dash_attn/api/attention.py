"""attention: forward and ordered backward under autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from dash_attn.api.arguments import Boundaries, Window, check_policy, problem_of, wants_determinism
from dash_attn.api.backends import Backend, Options, backend_for
from dash_attn.cpu import Gradients, Operands
from dash_attn.plan import plan
from dash_attn.problem import Mask, Problem


@dataclass(frozen=True)
class Call:
    """What the backward needs to know beside the tensors."""

    problem: Problem
    backend: Backend
    policy: str
    options: Options


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = call.backend.forward(call.problem, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        planned = plan(call.problem, call.backend.tile_shape(call.problem), call.policy)
        with torch.no_grad():
            grads = call.backend.backward(planned, Operands(dout, *ctx.saved_tensors), None, call.options)
        if torch.is_grad_enabled():  # create_graph=True
            grads = Once.apply(grads, dout, *ctx.saved_tensors[:3])  # type: ignore[no-untyped-call]
        return *(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)), None


class Once(torch.autograd.Function):
    """Gradients that refuse to be differentiated by what they came from. Under torch's once_differentiable they would
    be taken for constants when only q, k or v need a second derivative, and the result be silently wrong."""

    @staticmethod
    def forward(ctx: Any, grads: Gradients, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError(
            "dash_attn.attention can be differentiated once, not twice: for second derivatives use "
            "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.SDPBackend.MATH"
        )


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    cu_seqlens: Boundaries | None = ...,
    cu_seqlens_k: Boundaries | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    policy: str = ...,
    deterministic: bool | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    cu_seqlens: Boundaries | None = ...,
    cu_seqlens_k: Boundaries | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    policy: str = ...,
    deterministic: bool | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    cu_seqlens: Boundaries | None = None,
    cu_seqlens_k: Boundaries | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    policy: str = "auto",
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v, whose backward adds up in an order that is fixed before it runs.

    q is (batch, seqlen, heads, dim), or (tokens, heads, dim) with `cu_seqlens`; k and v likewise, with a number of
    heads that divides q's. float32, bfloat16 or float16; sums are float32.

    causal         a query sees keys up to its own position; positions are aligned at the end of each sequence
    window         (left, right): keys so far before and after that position; -1 or None is no limit
    cu_seqlens     0 and the end of each packed sequence; `cu_seqlens_k` if keys are packed differently
    mask           any dash_attn Mask beside, for instance dash_attn.tiles(cells, 256, 256); masks intersect
    scale          dim ** -0.5 if not given
    policy         the order of the backward: 'auto', a policy's name, or 'name:width'
    deterministic  None: yes, unless FLASH_ATTENTION_DETERMINISTIC=0 at this call and torch does not insist
    return_lse     also give the log-sum-exp of each row, float32 (batch, heads, seqlen), packed (heads, tokens);
                   it carries no gradient
    """
    problem = problem_of(
        q,
        k,
        v,
        causal=causal,
        window=window,
        boundaries={"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k},
        mask=mask,
        scale=scale,
    )
    check_policy(policy)
    call = Call(problem, backend_for(q.device), policy, Options(wants_determinism(deterministic)))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        # Here and not in the backward: what cannot be ordered is refused where the caller can see why.
        plan(problem, call.backend.tile_shape(problem), policy)
    packed = q.ndim == 3
    out, lse = Attention.apply(*(x.unsqueeze(0) if packed else x for x in (q, k, v)), call)  # type: ignore[no-untyped-call]
    if packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out
