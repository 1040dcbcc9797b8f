"""The operators dash_attn::context_parallel_forward and _backward, which torch.compile and checkpointing know by name.

An operator takes the tokens of this rank, (batch, seqlen, heads, dim), and plain values. All ranks of the group call it
at the same time. The steps of a call:

1. `meet`: the ranks compare their arguments and learn how many tokens there are.
2. `Heads.spread`: ranks that share heads exchange tokens for heads. It permutes.
3. `Tokens`: each rank computes its panels, with keys and values gathered from the other ranks.
4. `Heads.collect`: the way back of step 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_attn.api.arguments import Arguments, documents_of, pose, wants_determinism
from dash_attn.api.calls import read
from dash_attn.api.ops import OrderArguments, Posed, by_name
from dash_attn.backends import Extras, Gradients, Operands, Options, backend_for
from dash_attn.distributed.heads import Heads
from dash_attn.distributed.layout import Layout
from dash_attn.distributed.meeting import meet
from dash_attn.distributed.ranks import Ranks
from dash_attn.distributed.tokens import Tokens
from dash_attn.kept import kept
from dash_attn.prepare import prepare
from dash_attn.problem import Features

SEPARATOR = "\n"  # of the fields of a text


class Terms(NamedTuple):
    """Everything about a call but its tensors.

    groups            names of one or two process groups
    ways              ranks that share the heads of a sequence
    softcap, dropout  0 for none
    """

    posed: Posed
    order_arguments: OrderArguments
    groups: tuple[str, ...]
    ways: int
    layout: str
    softcap: float = 0.0
    dropout: float = 0.0

    def text(self) -> str:
        """As an operator takes it. torch.compile traces this."""
        (left, right, documents, tiles, scale, rows), (policy, deterministic, sm_margin, panels) = (
            self.posed,
            self.order_arguments,
        )
        numbers = (left, right, scale, deterministic, sm_margin, panels, self.ways, self.softcap, self.dropout)
        cu = " ".join([str(x) for x in documents])
        return SEPARATOR.join([*[str(x) for x in numbers], cu, tiles, rows, policy, self.layout, *self.groups])

    @staticmethod
    @kept()
    def read(text: str) -> Terms:
        left, right, scale, deterministic, sm_margin, panels, ways, softcap, dropout, cu, *others = text.split(
            SEPARATOR
        )
        tiles, rows, policy, layout, *groups = others
        factor = None if scale == "None" else float(scale)
        posed = Posed(int(left), int(right), [int(x) for x in cu.split()], tiles, factor, rows)
        order_arguments = OrderArguments(
            policy, {"None": None, "True": True, "False": False}[deterministic], int(sm_margin), int(panels)
        )
        return Terms(posed, order_arguments, tuple(groups), int(ways), layout, float(softcap), float(dropout))


class Shape(NamedTuple):
    """What a call knows of its tensors. `heads` are all heads of q and of k, also those on other ranks."""

    batch: int
    heads: tuple[int, int]
    dim: int
    dim_v: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, ways: int) -> Shape:
        heads = q.shape[2] * ways, k.shape[2] * ways
        return Shape(q.shape[0], heads, q.shape[3], v.shape[3], q.dtype, q.device)


class Around(NamedTuple):
    """The tensors of a call beside q, k and v, the same on every rank."""

    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None


@dataclass(frozen=True, eq=False)
class AgreedCall:
    """A call on which the ranks agree: the exchange of q and of k over heads, and the attention over tokens."""

    q: Heads
    k: Heads
    tokens: Tokens

    def extras(self, around: Around, dlse: Tensor | None = None) -> Extras | None:
        """Of the heads that this rank computes. dlse is already that of these heads."""
        if around.sinks is around.seed is dlse is None:
            return None
        sinks, axis = around.sinks, self.q.axis
        own = None if sinks is None else sinks.view(axis.size, -1)[axis.number]
        return Extras(sinks=own, seed=around.seed, dlse=dlse, head=axis.number * self.tokens.whole.problem.heads_q)


@torch.library.custom_op("dash_attn::context_parallel_forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    terms: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """out and lse of this rank's tokens, and the turn of the call, on the CPU.

    If ranks share heads, also the operands of the backward after `spread`.
    """
    said = Terms.read(terms)
    rows = q.shape[1], k.shape[1]
    around = Around(cu_seqlens, cu_seqlens_k, sinks, seed)
    is_again = torch._C._current_graph_task_id() != -1  # of the backward that runs in this thread
    call, at = agreed(Shape.of(q, k, v, 1), rows, around, said, Asks("forward again" if is_again else "forward"))
    turn, extras = torch.tensor(at, dtype=torch.int64, device="cpu"), call.extras(around)
    if said.ways == 1:
        return (*call.tokens.forward(q, k, v, extras), turn, [])
    q, k, v = (arrive() for arrive in [call.q.spread(q), call.k.spread(k), call.k.spread(v)])
    out, lse = call.tokens.forward(q, k, v, extras)
    own_out, own_lse = call.q.collect(out), call.q.collect(_tokens_first(lse))
    return own_out(), _heads_first(own_lse()), turn, [q, k, v, out, lse]


@torch.library.custom_op("dash_attn::context_parallel_backward", mutates_args=())
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    terms: str,
    rows: Sequence[int],
    turn: Tensor,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's tokens. `rows` are its numbers of queries and keys, `turn` is that of the forward.

    If ranks share heads, dout and dlse are as the forward gives out and lse, and the other tensors are as `spread`
    gives them.
    """
    said = Terms.read(terms)
    own_q, own_k = rows
    around = Around(cu_seqlens, cu_seqlens_k, sinks, seed)
    asks = Asks("backward", int(turn), dlse is not None)
    call, _ = agreed(Shape.of(q, k, v, said.ways), (own_q, own_k), around, said, asks)
    if said.ways == 1:
        return call.tokens.backward(Operands(dout, q, k, v, out, lse), call.extras(around, dlse))
    arriving = call.q.spread(dout)
    if dlse is not None:
        dlse = _heads_first(call.q.spread(_tokens_first(dlse))())
    grads = call.tokens.backward(Operands(arriving(), q, k, v, out, lse), call.extras(around, dlse))
    dq, dk, dv = call.q.collect(grads.dq), call.k.collect(grads.dk), call.k.collect(grads.dv)
    return Gradients(dq(), dk(), dv())


def _tokens_first(lse: Tensor) -> Tensor:
    """(batch, heads, tokens) as (batch, tokens, heads, 1), which `Heads` takes."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _heads_first(lse: Tensor) -> Tensor:
    """The way back."""
    return lse.squeeze(-1).transpose(1, 2).contiguous()


@forward.register_fake
def _(*given: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    arguments = by_name(torch.ops.dash_attn.context_parallel_forward.default, given) | named
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    ways = Terms.read(arguments["terms"]).ways
    batch, len_q, heads, _dim = q.shape
    out = q.new_empty((batch, len_q, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, len_q), dtype=torch.float32)
    turn = q.new_empty((), dtype=torch.int64, device="cpu")
    if ways == 1:
        return out, lse, turn, []
    # With torch.compile every rank must have the same number of tokens.
    spread = [x.new_empty((batch, x.shape[1] * ways, x.shape[2] // ways, x.shape[3])) for x in (q, k, v, out)]
    return out, lse, turn, [*spread, lse.new_empty((batch, heads // ways, len_q * ways))]


@backward.register_fake
def _(*given: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    arguments = by_name(torch.ops.dash_attn.context_parallel_backward.default, given) | named
    dout, q, k, v = (arguments[name] for name in ("dout", "q", "k", "v"))
    (_, own_k), ways = arguments["rows"], Terms.read(arguments["terms"]).ways
    dk, dv = (x.new_empty((x.shape[0], own_k, x.shape[2] * ways, x.shape[3])) for x in (k, v))
    return dout.new_empty((*dout.shape[:3], q.shape[3])), dk, dv


class Asks(NamedTuple):
    """What a rank asks for: one of CALLS. A backward also has the turn of its forward, and maybe a gradient of lse."""

    call: str
    forward: int = 0
    has_dlse: bool = False


def agreed(shape: Shape, rows: tuple[int, int], around: Around, terms: Terms, asks: Asks) -> tuple[AgreedCall, int]:
    """The call and its turn, after all ranks have agreed on it."""
    ranks = Ranks.named(terms.groups)
    cu = tuple(None if x is None else read(x) for x in around[:2])
    posed, order_arguments = terms.posed, terms.order_arguments
    order_arguments = order_arguments._replace(deterministic=wants_determinism(order_arguments.deterministic))
    met = meet(
        ranks,
        asks.call,
        {
            "software": backend_for(shape.device).software(),
            "shape of q (batch, heads, dim)": (shape.batch, shape.heads[0], shape.dim),
            "number of heads of k": shape.heads[1],
            "head dim of v": shape.dim_v,
            "dtype": shape.dtype,
            "cu_seqlens": cu[0],
            "cu_seqlens_k": cu[1],
            "window (left, right)": (posed.left, posed.right),
            "mask": (tuple(posed.documents), posed.tiles, posed.rows),
            "scale": posed.scale,
            "softcap": terms.softcap,
            "sinks": "not given" if around.sinks is None else around.sinks.tolist(),
            "dropout": terms.dropout,
            "seed": None if around.seed is None else around.seed.tolist(),
            "policy": order_arguments.policy,
            "deterministic": order_arguments.deterministic,
            # Without an order, strict torch is an error. It comes on all ranks or on none.
            "torch.use_deterministic_algorithms": order_arguments.deterministic
            or torch.are_deterministic_algorithms_enabled(),
            "panels and layout": (order_arguments.panels, terms.layout),
            "number of ranks that share heads (mode)": terms.ways,
            "gradient of lse": "given" if asks.has_dlse else "not given (add 0 * lse.sum() to the loss)",
        },
        rows,
        shape.device,
        asks.forward,
    )
    dim_v = None if shape.dim_v == shape.dim else shape.dim_v
    features = Features(terms.softcap, around.sinks is not None, terms.dropout, dim_v)
    text = terms._replace(order_arguments=order_arguments).text()
    return _call(shape, tuple(met.rows), cu, text, features, ranks), met.turn


@kept(growing=lambda call: call.tokens.whole)
def _call(
    shape: Shape,
    rows: tuple[tuple[int, int], ...],
    cu: tuple[tuple[int, ...] | None, ...],
    terms: str,
    features: Features,
    ranks: Ranks,
) -> AgreedCall:
    said = Terms.read(terms)
    panels = said.order_arguments.panels
    layout = Layout(said.layout, ranks.size, panels)
    totals = tuple(sum(each) for each in zip(*rows, strict=True))
    for name, mine, total in zip(("q", "k"), zip(*rows, strict=True), totals, strict=True):
        if list(mine) != layout.lengths(total):
            raise ValueError(
                f"{name} has {list(mine)} tokens on the ranks, where layout {said.layout!r} with {panels} panels puts "
                f"{layout.lengths(total)}: cut it with dash_attn.distributed.shard"
            )
    heads, tokens = ranks.split(said.ways)
    whole_q, whole_k = (
        torch.empty((shape.batch, total, count // said.ways, shape.dim), dtype=shape.dtype, device="meta")
        for total, count in zip(totals, shape.heads, strict=True)
    )
    packing = documents_of(Arguments(cu_q=cu[0], cu_k=cu[1]), whole_q, whole_k)
    problem = pose(whole_q, whole_k, said.posed.mask() & packing, said.posed.scale, panels, features)
    options = Options(bool(said.order_arguments.deterministic), said.order_arguments.sm_margin)
    whole = prepare(problem, said.order_arguments.policy, options, shape.device)
    whole.require_order()  # an error here comes on all ranks, before tensors are sent
    own = Tokens(whole, tokens, Layout(said.layout, tokens.size, panels))
    own.require_panels()
    q, k = (Heads.of(heads, layout, total, ranks.number) for total in totals)
    return AgreedCall(q, k, own)
