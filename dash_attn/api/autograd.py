"""attention: the forward, and the ordered backward under autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dash_attn.api import ops
from dash_attn.api.arguments import (
    DTYPES,
    Arguments,
    CuSeqlens,
    Window,
    check_arguments,
    mask_of,
    problem_of,
    traced_boundaries,
    wants_determinism,
)
from dash_attn.api.border import prepare
from dash_attn.api.calls import Boundaries, recall, traits
from dash_attn.api.extras import Given, Seed, is_plain, traced_extras
from dash_attn.api.ops import OrderArguments, Posed
from dash_attn.backends import Extras, Operands, Options
from dash_attn.problem import Mask

if TYPE_CHECKING:
    from dash_attn.prepare import Prepared
    from dash_attn.program import Program

PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may redefine operators
# What torch.compile has set to look at Python's frames, or None. Older versions of torch do not tell.
_tracer: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
BATCHED: Any = torch._C._parse_dispatch_key("Batched")  # torch.autograd gives a batch of gradients as one such tensor


class Attention(torch.autograd.Function):
    """A prepared problem under autograd: plain softmax, and lse has no gradient. It does as little as it can."""

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
        if torch._C._dispatch_keys(dout).has(BATCHED):
            refuse_batched()
        q, k, v, out, lse = ctx.saved_tensors
        operands = Operands(dout, q, k, v, out, lse)
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                grads = ctx.prepared.backward(operands)
            dq, dk, dv = _differentiable_once(grads, dout, q, k, v)
        else:
            dq, dk, dv = ctx.prepared.backward(operands)
        return dq, dk, dv, None  # autograd drops the gradient of a tensor that needs none


class FeaturedAttention(torch.autograd.Function):
    """A prepared problem under autograd, with sinks, a seed, or a gradient of lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, sinks: Tensor | None, seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        extras = None if sinks is None and seed is None else Extras(sinks, seed)
        out, lse = prepared.forward(q, k, v, extras)
        ctx.save_for_backward(q, k, v, out, lse, sinks, seed)
        ctx.set_materialize_grads(False)  # otherwise every backward fills a gradient of lse with zeros
        ctx.prepared = prepared
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None, None, None
        if any(x is not None and torch._C._dispatch_keys(x).has(BATCHED) for x in (dout, dlse)):
            refuse_batched()
        q, k, v, out, lse, sinks, seed = ctx.saved_tensors
        operands = Operands(torch.zeros_like(out) if dout is None else dout, q, k, v, out, lse)
        extras = None if sinks is None and seed is None and dlse is None else Extras(sinks, seed, dlse)
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                grads = _gradients(ctx, operands, extras)
            grads = _differentiable_once(grads, dout, q, k, v, sinks, dlse)
        else:
            grads = _gradients(ctx, operands, extras)
        dq, dk, dv, *dsinks = grads
        return dq, dk, dv, None, dsinks[0] if dsinks else None, None  # autograd drops what no tensor needs


def _gradients(ctx: Any, operands: Operands, extras: Extras | None) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, and of the sinks if they need one."""
    if extras is None or extras.sinks is None or not ctx.needs_input_grad[4]:
        grads: tuple[Tensor, ...] = ctx.prepared.backward(operands, None, extras)
        return grads
    dsinks = torch.empty_like(extras.sinks, memory_format=torch.contiguous_format)
    return (*ctx.prepared.backward(operands, None, extras._replace(dsinks=dsinks)), dsinks)


# Function.apply itself first handles the transforms of torch.func, which do not come here.
_apply: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, Attention).apply
_apply_featured: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, FeaturedAttention).apply


class Plain(NamedTuple):
    """The arguments of a traced call that are no tensors. Without `with_lse`, lse has no gradient."""

    posed: Posed
    order_arguments: OrderArguments
    softcap: float
    dropout: float
    with_lse: bool


class TracedAttention(torch.autograd.Function):
    """The same through the operators, for everything that looks at operators: torch.compile, dispatch modes, tensor
    subclasses."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor | None,
        cu_k: Tensor | None,
        sinks: Tensor | None,
        seed: Tensor | None,
        plain: Plain,
    ) -> tuple[Tensor, Tensor]:
        posed, panels = plain.posed._asdict(), plain.order_arguments.panels
        features = {"sinks": sinks, "seed": seed, "softcap": plain.softcap, "dropout": plain.dropout}
        out, lse = ops.forward(q, k, v, cu_q, cu_k, **posed, panels=panels, **features)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, sinks, seed)
        if not plain.with_lse:
            ctx.mark_non_differentiable(lse)
        ctx.plain = plain
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        plain: Plain = ctx.plain
        q, k, v, out, lse, cu_q, cu_k, sinks, seed = ctx.saved_tensors
        given = dlse if plain.with_lse else None
        features = {"sinks": sinks, "seed": seed, "softcap": plain.softcap, "dropout": plain.dropout, "dlse": given}
        needs = (*ctx.needs_input_grad[:3], sinks is not None and ctx.needs_input_grad[5])
        with torch.no_grad():
            ordered = {**plain.posed._asdict(), **plain.order_arguments._asdict()}
            grads = ops.backward(dout, q, k, v, out, lse, cu_q, cu_k, **ordered, **features)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # compiled code refuses it by itself
            grads = _differentiable_once(grads, dout, q, k, v, sinks, given)
        dq, dk, dv = (grad if needed else None for grad, needed in zip(grads[:3], needs, strict=False))
        return dq, dk, dv, None, None, grads[3] if needs[3] else None, None, None


def _differentiable_once(grads: tuple[Tensor, ...], *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """The gradients, with an error in place of their derivative by the inputs."""
    refusing: tuple[Tensor, ...] = Once.apply(grads, *inputs)  # type: ignore[no-untyped-call]
    return refusing


class Once(torch.autograd.Function):
    """Raises an error when gradients are differentiated.

    torch's once_differentiable treats the gradients as constants if only q, k or v need a second derivative. The result
    would be silently wrong.
    """

    @staticmethod
    def forward(ctx: Any, grads: tuple[Tensor, ...], *_: Tensor | None) -> tuple[Tensor, ...]:
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
    softcap: float = ...,
    sinks: Tensor | None = ...,
    dropout: float = ...,
    seed: Seed | None = ...,
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
    softcap: float = ...,
    sinks: Tensor | None = ...,
    dropout: float = ...,
    seed: Seed | None = ...,
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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: Seed | None = None,
    policy: str | Program = "auto",
    panels: int = 1,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v. The backward adds contributions in a fixed order.

    q, k and v are (batch, seqlen, heads, dim), or (tokens, heads, dim) with `cu_seqlens`. The number of heads of k and
    v divides that of q. On a CPU v may have another dim, which out has too. Tensors are float32, bfloat16 or float16,
    and sums are float32. Autocast casts the tensors.

    causal         a query sees keys up to its position; the last query of a sequence has the position of its last key
    window         (left, right): a query sees this many keys before and after its position. Each side is an int, a 0-d
                   integer tensor (read as `cu_seqlens` is), or None. -1 or None means no limit. One side below -1 is
                   counted in the other direction: (10, -3) are the keys from 10 to 3 before the position. Two negative
                   sides, or sides with no key between them, mean no limits. With `causal` the right side is 0
    cu_seqlens     0 and the end of each packed sequence, as a list or a tensor. For a tensor on a GPU the host waits
                   once, and again after a change of its values. torch.compile takes a list as a constant; the values
                   of a tensor may change
    cu_seqlens_k   the same for keys, if keys are packed differently
    mask           a dash_attn Mask, for instance dash_attn.intervals(first, end), intersected with the above
    scale          factor of the scores; None means dim ** -0.5
    softcap        scores s, already scaled, become softcap * tanh(s / softcap) before the mask; 0 leaves them
    sinks          (heads of q): a score for each query head that takes part in the softmax and has no value. It is not
                   scaled. The log-sum-exp includes it, and it has a gradient
    dropout        the probability that a weight becomes 0 after the softmax; other weights are divided by 1 - dropout
    seed           of dropout: an int from 0 to 2**63 - 1, or one for each sequence, as a list or an int64 tensor. With
                   one int, sequence number i (batch entry or packed sequence) has the seed `seed + i * 2**32`. Which
                   weights are dropped follows from the seed of the sequence, the number of the query head in the call,
                   and the places of query and key in the sequence. None draws a seed from torch's default generator on
                   the CPU, at each call with dropout
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
                   has a gradient
    """
    asked = Arguments(causal, window, cu_seqlens, cu_seqlens_k, mask, scale, policy, deterministic, panels=panels)
    if is_plain(softcap, dropout, sinks):
        out, lse = attend(q, k, v, asked, None, return_lse)
    else:
        given = Given(softcap, dropout, sinks, seed)
        out, lse = attend(q, k, v, asked._replace(features=given.features()), given.extras(q), return_lse)
    return (out, lse) if return_lse else out


def attend(
    q: Tensor, k: Tensor, v: Tensor, asked: Arguments, extras: Extras | None = None, with_lse: bool = False
) -> tuple[Tensor, Tensor]:
    """The output of `attention`, and the log-sum-exp. Without `with_lse` it may have no gradient."""
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        q, k, v = autocast(q, k, v)
    if torch.compiler.is_compiling():
        # While torch.compile traces, tensors have no values. The operators read and check them at run time.
        check_arguments(q, k, v, asked)
        cu = traced_boundaries(asked, q.device)
        return _traced(q, k, v, cu, traced_extras(extras, asked), plain_of(mask_of(asked), asked, with_lse))
    if callable(_tracer()):  # torch.compile has given up this call, and would trace the planner frame by frame
        return torch._dynamo.disable(attend)(q, k, v, asked, extras, with_lse)  # type: ignore[no-any-return,no-untyped-call]
    prepared = prepared_for(q, k, v, asked)
    sinks = None if extras is None else extras.sinks
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    )
    if needs_grad:
        prepared.require_order()  # a problem that cannot be ordered is an error here, not later in the backward
    if is_watched(q, k, v) or not (sinks is None or type(sinks) in PLAIN):
        return _traced(q, k, v, CuSeqlens(), extras, plain_of(prepared.problem.mask, asked, with_lse))
    if not needs_grad:
        refuse_tangents(q, k, v, sinks)
        return prepared.forward(q, k, v, extras)
    if extras is None and not with_lse:
        return _apply(q, k, v, prepared)
    return _apply_featured(q, k, v, prepared, sinks, None if extras is None else extras.seed)


def is_watched(*tensors: Tensor) -> bool:
    """Whether somebody looks at operators: a tensor subclass or a dispatch mode. torch.func may not."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "dash_attn has no rule for the transforms of torch.func (grad, vmap, jvp, ...): use torch.autograd, and "
            "put a batch into the first dimension of q, k and v"
        )
    for x in tensors:
        if type(x) not in PLAIN:
            return True
    return bool(torch._C._len_torch_dispatch_stack())


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Under autograd torch itself refuses a function without a forward-mode derivative."""
    if forward_ad._current_level < 0:
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(
                "dash_attn has no forward-mode derivative: use torch.autograd.backward, or torch.nn.functional."
                "scaled_dot_product_attention under torch.nn.attention.SDPBackend.MATH"
            )


def refuse_batched() -> None:
    raise NotImplementedError(
        "dash_attn has no rule for a batch of gradients (is_grads_batched=True, or vectorize=True): call the backward "
        "once for each gradient"
    )


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
    q: Tensor, k: Tensor, v: Tensor, cu: CuSeqlens, extras: Extras | None, plain: Plain
) -> tuple[Tensor, Tensor]:
    packed = q.ndim == 3
    # torch.compile does not trace one tensor that is given twice. It does trace two views.
    q, k, v = (x.unsqueeze(0) if packed else x.view_as(x) for x in (q, k, v))
    sinks, seed = (None, None) if extras is None else (extras.sinks, extras.seed)
    out, lse = TracedAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, cu.cu_seqlens_q, cu.cu_seqlens_k, sinks, seed, plain
    )
    return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)


def plain_of(mask: Mask, asked: Arguments, with_lse: bool) -> Plain:
    softcap, dropout = (0.0, 0.0) if asked.features is None else (asked.features.softcap, asked.features.dropout)
    return Plain(Posed.of(mask, asked.scale), order_arguments_of(asked), softcap, dropout, with_lse)


def order_arguments_of(asked: Arguments) -> OrderArguments:
    if not isinstance(asked.policy, str):  # checked before: it is a Program
        raise NotImplementedError(
            "policy is a program, which torch.compile, dispatch modes and tensor subclasses do not take: give the name "
            "of a policy, or call attention outside of them"
        )
    return OrderArguments(asked.policy, asked.deterministic, asked.sm_margin, asked.panels)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the tensors to the dtype of autocast if it is on for their device, as torch's own attention does."""
    kind = getattr(getattr(tensors[0], "device", None), "type", "")
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES else x for x in tensors)
