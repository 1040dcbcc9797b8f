"""shard and unshard: from a whole tensor to the tokens of this rank, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_attn.api.arguments import check_tensor
from dash_attn.distributed.layout import Layout, usual_panels
from dash_attn.distributed.meeting import meet, refuse
from dash_attn.distributed.ranks import Group, Ranks, ranks_of
from dash_attn.problem.numbers import whole as whole_number


def layout_of(ranks: Ranks, name: str, panels: int | None) -> Layout:
    """The layout over all ranks, with the usual number of panels if none is given."""
    return Layout(name, ranks.size, usual_panels(ranks.size) if panels is None else panels)


def shard(x: Tensor, *, group: Group = None, dim: int, layout: str = "zigzag", panels: int | None = None) -> Tensor:
    """The part of `x` that belongs to this rank, along the token dimension `dim`: a copy, also on one rank.

    Every rank gives the whole tensor. It may hold anything with one entry for each token: ids, labels, position ids,
    embeddings. A pack is cut like one long sequence. A cut may lie inside a document.

    group   a process group, a DeviceMesh of one or two dimensions, or None for all processes
    layout  'zigzag' or 'contiguous', as in `context_parallel_attention`
    panels  as in `context_parallel_attention`; it matters only if it does not divide the tokens
    """
    ranks = ranks_of(group)
    dim = _checked(x, dim)
    held = layout_of(ranks, layout, panels).held(x.shape[dim], ranks.number)
    return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in held or [(0, 0)]], dim).contiguous()


def unshard(x: Tensor, *, group: Group = None, dim: int, layout: str = "zigzag", panels: int | None = None) -> Tensor:
    """The whole tensor, on every rank, from the parts that `shard` or `context_parallel_attention` gives.

    The arguments are as in `shard`. A tensor that needs a gradient is refused: the result has none. What one rank
    refuses, or what differs on the ranks, is an error on all of them.
    """
    ranks = ranks_of(group)
    try:
        dim = _checked(x, dim)
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError("unshard has no gradient: give x.detach(), or call it under torch.no_grad()")
        if x.device.type not in ranks.kinds:
            raise ValueError(f"x must be on a device that the group serves, got {x.device}")
        cut = layout_of(ranks, layout, panels)
    except Exception as error:
        refuse(ranks, error, x)
        raise
    rows = x.movedim(dim, 0)
    alike = {
        "dtype": x.dtype,
        "dim": dim % x.ndim,
        "shape of x beside dim": tuple(rows.shape[1:]),
        "panels and layout": (cut.panels, layout),
    }
    lengths = [count for count, _ in meet(ranks, "unshard", alike, (len(rows), 0), x.device).rows]
    total = sum(lengths)
    if lengths != cut.lengths(total):
        raise ValueError(
            f"x has {lengths} rows on the ranks, where layout {layout!r} with {cut.panels} panels puts "
            f"{cut.lengths(total)}: give the layout and the panels that cut it"
        )
    padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
    padded[: len(rows)] = rows
    sent = padded.flatten().view(torch.uint8)  # gloo does not take every dtype
    parts = ranks.all_gather(sent).flatten().view(x.dtype).view(ranks.size, *padded.shape)
    whole = torch.cat([parts[rank, begin:end] for rank, (begin, end) in cut.pieces(total)] or [parts[0, :0]])
    return whole.movedim(0, dim).contiguous()


def _checked(x: Tensor, dim: int) -> int:
    """The dimension as a plain number."""
    check_tensor("x", x)
    dim = whole_number("dim", dim)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be a dimension of x, which has shape {tuple(x.shape)}; got {dim}")
    return dim
