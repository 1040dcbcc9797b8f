"""The operators dash_attn::forward and ::backward, which torch.compile and checkpointing know by name.

Context parallel calls a third one, ::sink_gradient, for the rows of a rank.

An operator takes tensors and plain values. It reads the values of cu_seqlens at run time. Tensors are (batch, seqlen,
heads, dim). Packed sequences are (1, tokens, heads, dim) with cu_seqlens. The operators themselves have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dash_attn.api.arguments import (
    BOTH_CU,
    Arguments,
    CuSeqlens,
    documents_of,
    pose,
    wants_determinism,
    with_dim_of,
)
from dash_attn.api.border import prepare
from dash_attn.api.calls import recall, traits, values_of
from dash_attn.backends import Extras, Operands, Options
from dash_attn.backends.sinks import sink_gradient as summed
from dash_attn.problem import Documents, Features, Mask, RowIntervals, TileMask

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from dash_attn.prepare import Prepared


class Posed(NamedTuple):
    """A mask and a scale in types that an operator can take. A window side of -1 means no limit."""

    left: int
    right: int
    documents: list[int]  # Documents.numbers
    tiles: str  # cell_m, cell_n, rows, columns, bits in hexadecimal
    scale: float | None
    rows: str = ""  # RowIntervals.text. Operators take it last, so that graphs exported without it stay valid

    @staticmethod
    def of(mask: Mask, scale: float | None) -> Posed:
        cu, cells = mask.documents, mask.tiles
        return Posed(
            -1 if mask.left is None else mask.left,
            -1 if mask.right is None else mask.right,
            [] if cu is None else cu.numbers(),
            "" if cells is None else f"{cells.cell_m} {cells.cell_n} {cells.shape[0]} {cells.shape[1]} {cells.bits}",
            None if scale is None else float(scale),
            "" if mask.rows is None else mask.rows.text,
        )

    def mask(self) -> Mask:
        cells = None
        if self.tiles:
            cell_m, cell_n, rows, columns, bits = self.tiles.split(" ")
            cells = TileMask(int(cell_m), int(cell_n), (int(rows), int(columns)), bits)
        return Mask(
            None if self.left == -1 else self.left,
            None if self.right == -1 else self.right,
            Documents.of_numbers(self.documents),
            cells,
            RowIntervals(self.rows) if self.rows else None,
        )


class OrderArguments(NamedTuple):
    """The arguments that fix the order and not the answer, in types that an operator can take."""

    policy: str = "auto"
    deterministic: bool | None = None
    sm_margin: int = 0
    panels: int = 1


@torch.library.custom_op("dash_attn::forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    left: int,
    right: int,
    documents: Sequence[int],
    tiles: str,
    scale: float | None,
    panels: int = 1,
    rows: str = "",
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    posed = Posed(left, right, list(documents), tiles, scale, rows)
    features = with_dim_of(v, q, Features(softcap, sinks is not None, dropout))
    cu = CuSeqlens(cu_seqlens_q, cu_seqlens_k)
    prepared = _prepared(q, k, cu, posed, OrderArguments(panels=panels), features)
    return prepared.forward(q, k, v, _extras(sinks, seed, None))


@torch.library.custom_op("dash_attn::backward", mutates_args=())
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    left: int,
    right: int,
    documents: Sequence[int],
    tiles: str,
    scale: float | None,
    policy: str,
    deterministic: bool | None,
    sm_margin: int,
    panels: int = 1,
    rows: str = "",
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the sinks. Without sinks the last one is empty."""
    posed = Posed(left, right, list(documents), tiles, scale, rows)
    order_arguments = OrderArguments(policy, deterministic, sm_margin, panels)
    features = with_dim_of(v, q, Features(softcap, sinks is not None, dropout))
    prepared = _prepared(q, k, CuSeqlens(cu_seqlens_q, cu_seqlens_k), posed, order_arguments, features)
    extras, dsinks = _extras(sinks, seed, dlse), _sink_room(q, sinks)
    if sinks is not None and extras is not None:
        extras = extras._replace(dsinks=dsinks)
    return (*prepared.backward(Operands(dout, q, k, v, out, lse), None, extras), dsinks)


@torch.library.custom_op("dash_attn::sink_gradient", mutates_args=())
def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, dlse: Tensor | None) -> Tensor:
    return summed(dout, out, lse, Extras(sinks, None, dlse))


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    batch, len_q, heads, _dim = q.shape
    return q.new_empty((batch, len_q, heads, v.shape[-1])), q.new_empty((batch, heads, len_q), dtype=torch.float32)


@backward.register_fake
def _(*given: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arguments = by_name(torch.ops.dash_attn.backward.default, given) | named
    room = (x.new_empty(x.shape) for x in (arguments["q"], arguments["k"], arguments["v"]))
    return (*room, _sink_room(arguments["q"], arguments.get("sinks")))


@sink_gradient.register_fake
def _(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, dlse: Tensor | None) -> Tensor:
    return sinks.new_empty(sinks.shape)


def by_name(operator: OpOverload, given: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments that an operator was given by place, by their names in its schema."""
    return {argument.name: value for argument, value in zip(operator._schema.arguments, given, strict=False)}


def _sink_room(q: Tensor, sinks: Tensor | None) -> Tensor:
    return q.new_empty(0 if sinks is None else sinks.shape, dtype=torch.float32)


def _extras(sinks: Tensor | None, seed: Tensor | None, dlse: Tensor | None) -> Extras | None:
    return None if sinks is seed is dlse is None else Extras(sinks, seed, dlse)


def _prepared(
    q: Tensor,
    k: Tensor,
    cu: CuSeqlens,
    posed: Posed,
    order_arguments: OrderArguments,
    features: Features,
) -> Prepared:
    # Compiled code passes None on, so that the setting at the call counts, not the setting at compilation.
    options = Options(wants_determinism(order_arguments.deterministic), order_arguments.sm_margin)
    plain = (posed.left, posed.right, tuple(posed.documents), posed.tiles, posed.scale, posed.rows)
    ordered = (order_arguments.policy, order_arguments.panels, options)
    key = ("operator", traits(q), traits(k), *map(values_of, cu), plain, ordered, features)

    def checked() -> Prepared:
        packing = documents_of(Arguments(cu_q=cu.cu_seqlens_q, cu_k=cu.cu_seqlens_k, words=BOTH_CU), q, k)
        problem = pose(q, k, posed.mask() & packing, posed.scale, order_arguments.panels, features)
        return prepare(problem, order_arguments.policy, options, q.device)

    return recall(key, checked)
