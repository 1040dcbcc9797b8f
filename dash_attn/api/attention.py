"""attention: forward and ordered backward under autograd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from dash_attn.api import ops
from dash_attn.api.arguments import (
    DTYPES,
    Boundaries,
    Window,
    check_flag,
    check_margin,
    check_policy,
    check_tensors,
    mask_of,
    problem_of,
    wants_determinism,
)
from dash_attn.api.ops import Posed
from dash_attn.backends import backend_for
from dash_attn.plan import plan
from dash_attn.problem import Mask


class Order(NamedTuple):
    """What only the backward asks for, as the operator takes it."""

    policy: str
    deterministic: bool | None
    sm_margin: int


class Attention(torch.autograd.Function):
    """Tensors and plain values only, so that torch.compile traces it; what they pose is read in the operators."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        posed: Posed,
        order: Order,
    ) -> tuple[Tensor, Tensor]:
        out, lse = ops.forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *posed)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        ctx.mark_non_differentiable(lse)
        ctx.posed, ctx.order = posed, order
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = ops.backward(dout, *ctx.saved_tensors, *ctx.posed, *ctx.order)
        # create_graph=True; compiled code refuses it by itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = Once.apply(grads, dout, *ctx.saved_tensors[:3])  # type: ignore[no-untyped-call]
        dq, dk, dv = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))
        return dq, dk, dv, None, None, None, None


class Once(torch.autograd.Function):
    """Gradients that refuse to be differentiated by what they came from. Under torch's once_differentiable they would
    be taken for constants when only q, k or v need a second derivative, and the result be silently wrong."""

    @staticmethod
    def forward(ctx: Any, grads: tuple[Tensor, ...], *_: Tensor) -> tuple[Tensor, ...]:
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
    heads that divides q's. float32, bfloat16 or float16; sums are float32. Under autocast they are cast to its dtype.

    causal         a query sees keys up to its own position; positions are aligned at the end of each sequence
    window         (left, right): keys so far before and after that position; -1 or None is no limit
    cu_seqlens     0 and the end of each packed sequence; `cu_seqlens_k` if keys are packed differently. Lists or
                   tensors, best on the CPU: the order follows from their values, and to read them from a GPU is to
                   wait for it. Under torch.compile a list is part of the compiled code, a tensor's values may change
    mask           any dash_attn Mask beside, for instance dash_attn.tiles(cells, 256, 256); masks intersect
    scale          dim ** -0.5 if not given
    policy         the order of the backward: 'auto', a policy's name, or 'name:width'
    deterministic  None: yes, unless FLASH_ATTENTION_DETERMINISTIC=0 at this call and torch does not insist
    return_lse     also give the log-sum-exp of each row, float32 (batch, heads, seqlen), packed (heads, tokens);
                   it carries no gradient
    """
    out, lse = attend(
        q,
        k,
        v,
        causal=causal,
        window=window,
        boundaries={"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k},
        mask=mask,
        scale=scale,
        policy=policy,
        deterministic=deterministic,
    )
    return (out, lse) if return_lse else out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: Window | None,
    boundaries: Mapping[str, Boundaries | None],
    mask: Mask | None,
    scale: float | None,
    policy: str,
    deterministic: bool | None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:
    """`attention` and its log-sum-exp, with cu_seqlens by the names that the caller knows them by."""
    q, k, v = (_autocast(x) for x in (q, k, v))
    check_policy(policy)
    check_margin(sm_margin)
    check_flag("deterministic", deterministic)
    cu: list[Tensor | None] = [None, None]
    if torch.compiler.is_compiling():
        # Values are not known while code is compiled: the operators read and check them at run time.
        check_tensors(q, k, v, boundaries, scale)
        posed = Posed.of(mask_of(causal, window, mask), scale)
        first, second = boundaries.values()
        second = None if second is first else second
        cu = [x if x is None or isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int32) for x in (first, second)]
        q, k, v = q.view_as(q), k.view_as(k), v.view_as(v)  # one tensor given twice is not traced, two views are
    else:
        problem = problem_of(q, k, v, causal=causal, window=window, boundaries=boundaries, mask=mask, scale=scale)
        posed, deterministic = Posed.of(problem.mask, scale), wants_determinism(deterministic)
        backend = backend_for(q.device)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            # Here and not in the backward: what cannot be ordered is refused where the caller can see why.
            plan(problem, backend.tile_shape(problem), policy)
    packed = q.ndim == 3
    q, k, v = (x.unsqueeze(0) if packed else x for x in (q, k, v))
    order = Order(policy, deterministic, sm_margin)
    out, lse = Attention.apply(q, k, v, *cu, posed, order)  # type: ignore[no-untyped-call]
    return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)


def _autocast(x: Tensor) -> Tensor:
    """As torch's own attention: under autocast all three come in its dtype, whatever layers they went through."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.device.type not in ("cpu", "cuda"):
        return x  # to be refused
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x
