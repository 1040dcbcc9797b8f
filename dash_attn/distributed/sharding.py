"""shard and unshard: from a whole tensor to the tokens of this rank, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_attn.distributed.layout import Layout, usual_panels
from dash_attn.distributed.ranks import Group, Ranks, ranks_of


def layout_of(ranks: Ranks, name: str, panels: int | None) -> Layout:
    """The layout over all ranks, with the usual number of panels if none is given."""
    return Layout(name, ranks.size, usual_panels(ranks.size) if panels is None else panels)


def shard(x: Tensor, *, group: Group = None, dim: int, layout: str = "zigzag", panels: int | None = None) -> Tensor:
    """The part of `x` that belongs to this rank, along the token dimension `dim`.

    Every rank gives the whole tensor. It may hold anything with one entry for each token: ids, labels, position ids,
    embeddings. A pack is cut like one long sequence. A cut may lie inside a document.

    group   a process group, a DeviceMesh of one or two dimensions, or None for all processes
    layout  'zigzag' or 'contiguous', as in `context_parallel_attention`
    panels  as in `context_parallel_attention`; it matters only if it does not divide the tokens
    """
    ranks = ranks_of(group)
    held = layout_of(ranks, layout, panels).held(x.shape[dim], ranks.number)
    parts = [x.narrow(dim, begin, end - begin) for begin, end in held] or [x.narrow(dim, 0, 0)]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()


def unshard(x: Tensor, *, group: Group = None, dim: int, layout: str = "zigzag", panels: int | None = None) -> Tensor:
    """The whole tensor, on every rank, from the parts that `shard` or `context_parallel_attention` gives.

    The arguments are as in `shard`. A tensor that needs a gradient is refused: the result has none.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("unshard has no gradient: give x.detach(), or call it under torch.no_grad()")
    ranks = ranks_of(group)
    cut = layout_of(ranks, layout, panels)
    rows = x.movedim(dim, 0)
    counts = torch.tensor([len(rows)], dtype=torch.int64, device=x.device)
    lengths = ranks.all_gather(counts).flatten().tolist()
    total = sum(lengths)
    if lengths != cut.lengths(total):
        raise ValueError(
            f"x has {lengths} rows on the ranks, where layout {layout!r} with {cut.panels} panels puts "
            f"{cut.lengths(total)}: give the layout and the panels that cut it"
        )
    padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = ranks.all_gather(padded)
    whole = torch.cat([parts[rank, begin:end] for rank, (begin, end) in cut.pieces(total)] or [parts[0, :0]])
    return whole.movedim(0, dim).contiguous()
