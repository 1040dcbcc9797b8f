"""attention: the forward, and the ordered backward under autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from dash_attn.api import ops
from dash_attn.api.arguments import (
    DTYPES,
    Arguments,
    Window,
    check_arguments,
    mask_of,
    problem_of,
    traced_boundaries,
    wants_determinism,
)
from dash_attn.api.calls import Boundaries, recall, traits
from dash_attn.api.ops import Order, Posed
from dash_attn.backends import Operands, Options
from dash_attn.prepare import Prepared, prepare
from dash_attn.problem import Mask
from dash_attn.program import Program

PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may redefine operators


class Attention(torch.autograd.Function):
    """A prepared problem under autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
        out, lse = prepared.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # otherwise every backward fills a gradient of lse with zeros
        ctx.prepared = prepared
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        operands = Operands(dout, q, k, v, out, lse)
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                grads = ctx.prepared.backward(operands)
            dq, dk, dv = _differentiable_once(grads, dout, q, k, v)
        else:
            dq, dk, dv = ctx.prepared.backward(operands)
        return dq, dk, dv, None  # autograd drops the gradient of a tensor that needs none


# Function.apply itself first handles the transforms of torch.func, which do not come here.
_apply: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, Attention).apply


class TracedAttention(torch.autograd.Function):
    """The same through the operators, for everything that looks at operators: torch.compile, dispatch modes, tensor
    subclasses."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, plain: tuple[Posed, Order]
    ) -> tuple[Tensor, Tensor]:
        posed, order = plain
        out, lse = ops.forward(q, k, v, cu_q, cu_k, *posed[:-1], order.panels, posed.rows)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.mark_non_differentiable(lse)
        ctx.posed, ctx.order = posed, order
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = ops.backward(dout, *ctx.saved_tensors, *ctx.posed[:-1], *ctx.order, ctx.posed.rows)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # compiled code refuses it by itself
            grads = _differentiable_once(grads, dout, *ctx.saved_tensors[:3])
        dq, dk, dv = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))
        return dq, dk, dv, None, None, None


def _differentiable_once(grads: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradients, with an error in place of their derivative by the inputs."""
    refusing: tuple[Tensor, ...] = Once.apply(grads, *inputs)  # type: ignore[no-untyped-call]
    return refusing


class Once(torch.autograd.Function):
    """Raises an error when gradients are differentiated.

    torch's once_differentiable treats the gradients as constants if only q, k or v need a second derivative. The result
    would be silently wrong.
    """

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
    policy: str | Program = ...,
    panels: int = ...,
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
    policy: str | Program = ...,
    panels: int = ...,
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
    policy: str | Program = "auto",
    panels: int = 1,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v. The backward adds contributions in a fixed order.

    q, k and v are (batch, seqlen, heads, dim), or (tokens, heads, dim) with `cu_seqlens`. The number of heads of k and
    v divides that of q. Tensors are float32, bfloat16 or float16, and sums are float32. Autocast casts the tensors.

    causal         a query sees keys up to its position; the last query of a sequence has the position of its last key
    window         (left, right): a query sees this many keys before and after its position. Each side is an int, a 0-d
                   integer tensor (a GPU tensor makes the host wait), or None. -1 or None means no limit. Two negative
                   sides mean no limits. One side below -1 is counted in the other direction: (10, -3) are the keys
                   from 10 to 3 before the position. With `causal` the right side is 0
    cu_seqlens     0 and the end of each packed sequence, as a list or a tensor. A GPU tensor makes the host wait for
                   the GPU. torch.compile takes a list as a constant; the values of a tensor may change
    cu_seqlens_k   the same for keys, if keys are packed differently
    mask           a dash_attn Mask, for instance dash_attn.intervals(first, end), intersected with the above
    scale          factor of the scores; None means dim ** -0.5
    policy         the order of the backward: 'auto', a policy's name, or 'name:width'. With '@head' behind it each
                   query head is ordered by itself, else all query heads of a key/value head together. 'auto' does the
                   first for short sequences and the second for long ones; 'auto@head' and 'auto@group' fix it. The
                   two have different bits. `policy` may also be a Program for this problem, as dash_attn.load reads it
                   from a file. It is verified and compared with the problem. Packed sequences and torch.compile take
                   no Program
    panels         cuts the query rows of each batch entry, or of the whole pack, into this many ranges of equal length.
                   The part of a sequence in one range is ordered by itself, with the keys that it sees. dK and dV are
                   summed over the parts in float32, from the last part to the first. Context parallel needs such a cut.
                   Another number has other bits. On a CPU the forward runs part by part too. On a GPU it runs over the
                   whole sequence: no test shows that out and lse of a part have the bits of a call with this part alone
    deterministic  None means yes, unless FLASH_ATTENTION_DETERMINISTIC=0 is set and torch does not ask for determinism
    return_lse     also return the log-sum-exp of each row, float32 (batch, heads, seqlen), packed (heads, tokens). It
                   has no gradient
    """
    asked = Arguments(causal, window, cu_seqlens, cu_seqlens_k, mask, scale, policy, deterministic, panels=panels)
    out, lse = attend(q, k, v, asked)
    return (out, lse) if return_lse else out


def attend(q: Tensor, k: Tensor, v: Tensor, asked: Arguments) -> tuple[Tensor, Tensor]:
    """The output of `attention`, and the log-sum-exp."""
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        q, k, v = autocast(q, k, v)
    if torch.compiler.is_compiling():
        # While torch.compile traces, tensors have no values. The operators read and check them at run time.
        check_arguments(q, k, v, asked)
        cu = traced_boundaries(asked, q.device)
        return _traced(q, k, v, cu, (Posed.of(mask_of(asked), asked.scale), order_of(asked)))
    prepared = prepared_for(q, k, v, asked)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if needs_grad:
        prepared.require_order()  # a problem that cannot be ordered is an error here, not later in the backward
    if _is_watched(q, k, v):
        return _traced(q, k, v, (None, None), (Posed.of(prepared.problem.mask, asked.scale), order_of(asked)))
    if not needs_grad:
        return prepared.forward(q, k, v)
    return _apply(q, k, v, prepared)


def _is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether somebody looks at operators: a tensor subclass, a dispatch mode or a transform of torch.func."""
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN:
        return True
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active())


def prepared_for(q: Tensor, k: Tensor, v: Tensor, asked: Arguments) -> Prepared:
    """The checked and prepared problem of a call. A call that is like an earlier one is not checked again."""

    def checked() -> Prepared:
        problem = problem_of(q, k, v, asked)
        options = Options(wants_determinism(asked.deterministic), asked.sm_margin)
        return prepare(problem, asked.policy, options, q.device)

    try:
        key = (traits(q), traits(k), traits(v), asked.key())
    except (AttributeError, TypeError, RuntimeError):  # not a dense tensor, or not hashable: the checks say which
        return checked()
    return recall(key, checked)


def _traced(
    q: Tensor, k: Tensor, v: Tensor, cu: tuple[Tensor | None, Tensor | None], plain: tuple[Posed, Order]
) -> tuple[Tensor, Tensor]:
    packed = q.ndim == 3
    # torch.compile does not trace one tensor that is given twice. It does trace two views.
    q, k, v = (x.unsqueeze(0) if packed else x.view_as(x) for x in (q, k, v))
    out, lse = TracedAttention.apply(q, k, v, *cu, plain)  # type: ignore[no-untyped-call]
    return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)


def order_of(asked: Arguments) -> Order:
    if isinstance(asked.policy, Program):
        raise NotImplementedError(
            "policy is a program, which torch.compile, dispatch modes and tensor subclasses do not take: give the name "
            "of a policy, or call attention outside of them"
        )
    return Order(asked.policy, asked.deterministic, asked.sm_margin, asked.panels)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the tensors to the dtype of autocast if it is on for their device, as torch's own attention does."""
    kind = getattr(getattr(tensors[0], "device", None), "type", "")
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES else x for x in tensors)
