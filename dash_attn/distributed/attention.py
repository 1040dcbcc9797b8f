"""context_parallel_attention: attention over a sequence whose tokens lie on several ranks."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from dash_attn.api.arguments import Arguments, Window, check_arguments, mask_of, traced_boundaries
from dash_attn.api.autograd import autocast, order_arguments_of
from dash_attn.api.calls import Boundaries
from dash_attn.api.extras import Given, Seed
from dash_attn.api.ops import Posed, sink_gradient
from dash_attn.backends import backend_for
from dash_attn.distributed import ops
from dash_attn.distributed.layout import MODES, Layout, usual_panels
from dash_attn.distributed.meeting import refuse
from dash_attn.distributed.ops import Around, Terms
from dash_attn.distributed.ranks import Group, Ranks, ranks_of
from dash_attn.problem import Mask


class ContextParallel(torch.autograd.Function):
    """The operators under autograd. Tensors are (batch, seqlen, heads, dim)."""

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
        terms: str,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        out, lse, turn, spread = ops.forward(q, k, v, cu_q, cu_k, sinks, seed, terms)
        own = () if sinks is None else (out, lse)  # of this rank's tokens, with all heads
        ctx.save_for_backward(*(spread or (q, k, v, out, lse)), cu_q, cu_k, sinks, seed, turn, *own)
        if not with_lse:
            ctx.mark_non_differentiable(lse)
        ctx.turn = None
        if not torch.compiler.is_compiling():  # which does not know this setting
            ctx.set_materialize_grads(False)  # otherwise every backward fills a gradient of lse with zeros
            ctx.turn = turn  # a checkpoint saves the tensors of its second forward, but keeps this
        ctx.terms, ctx.with_lse, ctx.shape, ctx.rows = terms, with_lse, out.shape, (q.shape[1], k.shape[1])
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # compiled code refuses it by itself
            error = NotImplementedError(
                "context_parallel_attention can be differentiated once, not twice: leave out create_graph=True"
            )
            refuse(Ranks.named(Terms.read(ctx.terms).groups), error, dout, dlse)
            raise error
        q, k, v, out, lse, cu_q, cu_k, sinks, seed, turn, *own = ctx.saved_tensors
        turn = turn if ctx.turn is None else ctx.turn
        if dout is None:  # also without dlse the rank takes part, because others may wait for it
            dout = out.new_zeros(ctx.shape)
        if not ctx.with_lse:
            dlse = None
        grads = ops.backward(dout, q, k, v, out, lse, cu_q, cu_k, sinks, seed, ctx.terms, ctx.rows, turn, dlse)
        dq, dk, dv = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))
        dsinks = sink_gradient(dout, *own, sinks, dlse) if own and ctx.needs_input_grad[5] else None
        return dq, dk, dv, None, None, dsinks, None, None, None


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = ...,
    mode: str = ...,
    layout: str = ...,
    panels: int | None = ...,
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
    policy: str = ...,
    deterministic: bool | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = ...,
    mode: str = ...,
    layout: str = ...,
    panels: int | None = ...,
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
    policy: str = ...,
    deterministic: bool | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    mode: str = "auto",
    layout: str = "zigzag",
    panels: int | None = None,
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
    policy: str = "auto",
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`dash_attn.attention` over tokens that lie on several ranks. Each rank gives its tokens, as `shard` cuts them.

    out, lse, dq, dk and dv of a token have the bits of `dash_attn.attention(..., panels=panels)` in one process. The
    number of ranks, the mode and the layout do not change them. All ranks of the group call the function at the same
    time and with the same arguments. They also run the backward at the same time.

    group    a process group, or None for all processes. A DeviceMesh of two dimensions gives heads to the ranks of its
             last dimension and tokens to those of its first one
    mode     'a2a': ranks exchange tokens for heads, as in Ulysses. If the number of ranks does not divide the kv heads,
             fewer ranks share the heads, and keys and values are gathered as in 'all_gather'. 'all_gather': every rank
             gathers all keys and values, some heads at a time. 'a2a+all_gather': both, on a mesh of two dimensions.
             'auto': 'a2a' if the number of ranks divides the kv heads, else 'all_gather'; 'a2a+all_gather' on such a
             mesh
    layout   'zigzag': each rank has early and late tokens, so that causal work is equal. 'contiguous': each rank has
             neighbouring tokens
    panels   the tokens are cut into this number of ranges, and each rank holds whole ranges. The number changes the
             bits. None means 16 for 1, 2, 4 and 8 ranks, and for other numbers of ranks the least multiple of 2 * ranks
             that is not below 16. To compare runs on different numbers of ranks, give the same number to all

    cu_seqlens has 0 and the ends of the sequences in the whole pack, the same on every rank. The sinks are the same on
    every rank too, and have the gradient that comes from this rank's queries, as any weight. Dropout needs a seed, the
    same on every rank. With return_lse, lse has a gradient too: the losses of all ranks depend on lse, or those of
    none. The other arguments are as in `dash_attn.attention`, but `policy` is a name.
    """
    ranks = ranks_of(group)
    panels = usual_panels(ranks.size) if panels is None else panels
    asked = Arguments(causal, window, cu_seqlens, cu_seqlens_k, mask, scale, policy, deterministic, panels=panels)
    q, k, v = autocast(q, k, v)
    given = Given(softcap, dropout, sinks, seed)
    terms, around = terms_of(q, k, v, asked, given, Sharing(ranks, mode, layout))
    packed = q.ndim == 3
    if packed:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    out, lse = ContextParallel.apply(q, k, v, *around, terms.text(), return_lse)  # type: ignore[no-untyped-call]
    if packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


class Sharing(NamedTuple):
    """How the ranks share a sequence: `mode` and `layout` as in `context_parallel_attention`."""

    ranks: Ranks
    mode: str
    layout: str


def terms_of(q: Tensor, k: Tensor, v: Tensor, asked: Arguments, given: Given, sharing: Sharing) -> tuple[Terms, Around]:
    """The checked arguments of this rank. torch.compile traces this.

    Any error here is told to the other ranks, which would wait for this one.
    """
    ranks = sharing.ranks
    try:
        check_arguments(q, k, v, asked)
        features = given.features()
        if features.dropout and given.seed is None:
            raise ValueError("dropout needs a seed, the same on every rank: give seed")
        extras = given.extras(q)
        Layout(sharing.layout, ranks.size, asked.panels)  # it checks the panels
        ways = _ways(ranks, sharing.mode, k.shape[-2])
        posed, order_arguments = Posed.of(mask_of(asked), asked.scale), order_arguments_of(asked)
        if not torch.compiler.is_compiling():
            backend_for(q.device)
        around = Around(*traced_boundaries(asked, q.device), extras.sinks, extras.seed)
    except Exception as error:
        if not torch.compiler.is_compiling():
            refuse(ranks, error, q, k, v)
        raise
    return Terms(posed, order_arguments, ranks.names, ways, sharing.layout, features.softcap, features.dropout), around


def _ways(ranks: Ranks, mode: str, heads_kv: int) -> int:
    """The number of ranks that share the heads of a sequence."""
    if mode not in ("auto", *MODES):
        raise ValueError(f"mode must be one of auto, {', '.join(MODES)}, got {mode!r}")
    is_grid = len(ranks.axes) == 2
    if is_grid != (mode == "a2a+all_gather") and mode != "auto":
        raise ValueError(
            f"mode {mode!r} needs a group of {'one dimension' if is_grid else 'two dimensions, a DeviceMesh'}: give "
            "another group, or mode='auto'"
        )
    if not is_grid:
        # The greatest common divisor. torch.compile cannot trace math.gcd with a number of heads that may change.
        shared = max([ways for ways in range(1, ranks.size + 1) if ranks.size % ways == 0 and heads_kv % ways == 0])
        # Ranks that share heads and tokens send more than they save (docs/scale.md).
        return 1 if mode == "all_gather" or (mode == "auto" and shared < ranks.size) else shared
    ways = ranks.axes[1].size
    if heads_kv % ways:
        raise ValueError(
            f"k has {heads_kv} heads, which the {ways} ranks of the last dimension of the mesh cannot share: give a "
            "mesh whose last dimension divides them"
        )
    return ways
