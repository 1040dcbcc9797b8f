"""backward: the gradients alone, for callers with a forward of their own."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dash_attn.api import ops
from dash_attn.api.arguments import (
    BOTH_CU,
    Arguments,
    Window,
    check_arguments,
    check_like,
    check_lse,
    check_room,
    mask_of,
    problem_of,
    traced_boundaries,
    wants_determinism,
)
from dash_attn.api.autograd import is_watched, plain_of, refuse_tangents
from dash_attn.api.border import prepare
from dash_attn.api.calls import Boundaries, recall, traits
from dash_attn.api.extras import Given, Seed, is_plain
from dash_attn.api.overlap import refuse_overlap
from dash_attn.backends import Extras, Gradients, Operands, Options
from dash_attn.problem import Mask

if TYPE_CHECKING:
    from dash_attn.prepare import Prepared
    from dash_attn.program import Program


class Rooms(NamedTuple):
    """The tensors that the caller gives for results."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None


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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: Seed | None = None,
    dlse: Tensor | None = None,
    policy: str | Program = "auto",
    panels: int = 1,
    deterministic: bool | None = True,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    dsinks: Tensor | None = None,
    sm_margin: int = 0,
) -> Gradients:
    """(dq, dk, dv) of `attention`, from its inputs, its output and the gradient of its output.

    lse         log-sum-exp as FlashAttention and torch give it: float32, natural logarithm, (batch, heads, seqlen) or
                packed (heads, tokens). With sinks it includes them
    dlse        the gradient of lse, as lse; None means zeros
    seed        of the forward; dropout needs it
    dq, dk, dv  tensors for the results. If one of them shares memory with another tensor of the call, it is an error,
                because dq also serves as a workspace. Slices of one tensor that share no element are fine
    dsinks      a float32 tensor (heads of q) for the gradient of the sinks, which is computed only then
    sm_margin   SMs of a GPU that the backward leaves to other kernels; it never changes the bits

    The other arguments are as in `attention`.
    """

    def check() -> None:
        model, said = q, "q"
        if v.shape[-1] != q.shape[-1]:
            model, said = q[..., :1].expand(*q.shape[:-1], v.shape[-1]), "q with the head dim of v"
        check_like("out", out, said, model)
        check_like("dout", dout, said, model)
        check_lse("lse", lse, q)
        for name, given, model_name, model in (("dq", dq, "q", q), ("dk", dk, "k", k), ("dv", dv, "v", v)):
            if given is not None:
                check_room(name, given, model_name, model)

    def checked() -> Prepared:
        problem = problem_of(q, k, v, asked)
        check()
        return prepare(problem, policy, Options(wants_determinism(deterministic), sm_margin), q.device)

    asked = Arguments(
        causal,
        window,
        cu_seqlens_q,
        cu_seqlens_k,
        mask,
        scale,
        policy,
        deterministic,
        sm_margin,
        BOTH_CU,
        panels=panels,
    )
    extras: Extras | None = None
    if not is_plain(softcap, dropout, sinks):
        features = Given(softcap, dropout, sinks, seed)
        asked = asked._replace(features=features.features())
        if dropout and seed is None:
            raise ValueError(f"dropout is {dropout} and seed is None: give the seed of the forward")
        extras = features.extras(q)
    if dlse is not None:
        check_lse("dlse", dlse, q)
        extras = (extras or Extras())._replace(dlse=dlse)
    if dsinks is not None:
        if extras is None or extras.sinks is None:
            raise ValueError("dsinks was given without sinks: give the sinks of the forward")
        check_room("dsinks", dsinks, "sinks in float32", extras.sinks)
    operands, rooms = Operands(dout, q, k, v, out, lse), Rooms(dq, dk, dv, dsinks)
    if torch.compiler.is_compiling() or is_watched(*operands):
        check_arguments(q, k, v, asked)
        check()
        return _traced(operands, asked, extras or Extras(), rooms)
    refuse_tangents(*operands)
    try:
        layouts = tuple([None if x is None else (traits(x), x.stride()) for x in rooms])
        key = ("backward", *map(traits, operands), layouts, asked.key())
    except (AttributeError, TypeError, RuntimeError):  # not a dense tensor, or not hashable: the checks say which
        prepared = checked()
    else:
        prepared = recall(key, checked)
    if dq is dk is dv is dsinks is None:
        return prepared.backward(operands, None, extras)
    # Addresses are no part of the key, so every call with tensors for the results is checked.
    outputs = rooms._asdict().items()
    inputs = [*operands._asdict().items(), ("sinks", sinks), ("dlse", dlse)]
    if dsinks is not None and extras is not None:
        extras = extras._replace(dsinks=torch.empty_like(dsinks, memory_format=torch.contiguous_format))
    refuse_overlap(*([(name, x) for name, x in some if x is not None] for some in (outputs, inputs)))
    models = zip((dq, dk, dv), (q, k, v), strict=True)
    into = [torch.empty_like(x, memory_format=torch.contiguous_format) if room is None else room for room, x in models]
    with torch.no_grad():  # a tensor that needs a gradient takes results too
        grads = prepared.backward(operands, Gradients(*into), extras)
        if dsinks is not None and extras is not None and extras.dsinks is not None:
            dsinks.copy_(extras.dsinks)
    return grads


def _traced(operands: Operands, asked: Arguments, extras: Extras, rooms: Rooms) -> Gradients:
    """The same through the operator, for everything that looks at operators. Tensors may have no addresses there."""
    if any(a is b for a, b in combinations([x for x in rooms if x is not None], 2)):
        raise ValueError(
            "two of dq, dk, dv and dsinks are the same tensor: give each memory of its own, or leave it out"
        )
    packed, cu = operands.q.ndim == 3, traced_boundaries(asked, operands.q.device)
    plain = plain_of(mask_of(asked), asked, True)
    dlse = extras.dlse.unsqueeze(0) if packed and extras.dlse is not None else extras.dlse
    operands = Operands(*[x.unsqueeze(0) for x in operands]) if packed else operands
    dq, dk, dv, dsinks = ops.backward(
        **operands._asdict(),
        **cu._asdict(),
        **plain.posed._asdict(),
        **plain.order_arguments._asdict(),
        sinks=extras.sinks,
        seed=extras.seed,
        softcap=plain.softcap,
        dropout=plain.dropout,
        dlse=dlse,
    )
    if packed:
        dq, dk, dv = dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)
    grads = Gradients(_placed(dq, rooms.dq), _placed(dk, rooms.dk), _placed(dv, rooms.dv))
    _placed(dsinks, rooms.dsinks)
    return grads


def _placed(result: Tensor, room: Tensor | None) -> Tensor:
    """The result, in the room for it if the caller gave one."""
    if room is None:
        return result
    with torch.no_grad():
        return room.copy_(result)
