"""explain: what a call of context_parallel_attention would send and hold, without running it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from dash_attn.api.arguments import Arguments, Window
from dash_attn.api.calls import Boundaries
from dash_attn.api.extras import Given, Seed
from dash_attn.distributed.attention import Sharing, terms_of
from dash_attn.distributed.layout import usual_panels
from dash_attn.distributed.ops import Asks, Shape, agreed
from dash_attn.distributed.ranks import Group, ranks_of
from dash_attn.distributed.scale import Cluster, Rank, exchanged
from dash_attn.problem import Mask


@dataclass(frozen=True)
class RankExplanation:
    """What a call does on this rank.

    heads_over       the number of ranks that share the heads of a sequence
    tokens_over      the number of ranks that share the tokens of one head
    tokens           queries that this rank holds, of all sequences of a batch
    forward_bytes    sent to other ranks in the forward
    backward_bytes   sent to other ranks in the backward, without a gradient of lse
    gathered_bytes   memory for gathered keys and values, sent, received and in order, at most
    sums_bytes       memory for float32 dK and dV of panels that travel, computed, sent and received, at most
    workspace_bytes  other memory of the backward, at most. Where nothing travels, it has the float32 dK and dV of
                     panels. On a GPU it always has them
    predicted_ms     time of forward and backward in the model of `dash-attn simulate --ranks`, for H200 GPUs and bf16
    exposed_ms       the part of this time in which the rank waits for tensors and computes nothing
    """

    ranks: int
    heads_over: int
    tokens_over: int
    layout: str
    panels: int
    tokens: int
    forward_bytes: int
    backward_bytes: int
    gathered_bytes: int
    sums_bytes: int
    workspace_bytes: int
    predicted_ms: float
    exposed_ms: float

    def __str__(self) -> str:
        values = ((field.name.replace("_", " "), getattr(self, field.name)) for field in fields(self))
        return "\n".join(f"{name:<16} {f'{x:.3f}' if isinstance(x, float) else x}" for name, x in values)


def explain(
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
) -> RankExplanation:
    """Explain a call of `context_parallel_attention` with the same arguments. All ranks call it at the same time."""
    ranks = ranks_of(group)
    panels = usual_panels(ranks.size) if panels is None else panels
    asked = Arguments(causal, window, cu_seqlens, cu_seqlens_k, mask, scale, policy, deterministic, panels=panels)
    given = Given(softcap, dropout, sinks, seed)
    terms, around = terms_of(q, k, v, asked, given, Sharing(ranks, mode, layout))
    if q.ndim == 3:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    call, _ = agreed(Shape.of(q, k, v, 1), (q.shape[1], k.shape[1]), around, terms, Asks("explain"))
    tokens, problem, ways = call.tokens, call.tokens.whole.problem, call.q.axis.size
    forward, backward = exchanged(problem, (call.q, call.k), q.shape[0])
    load = tokens.load()
    spans = Rank(problem, layout, ranks.size, ways, ranks.number).spans(Cluster())
    seconds = spans.forward + spans.backward
    return RankExplanation(
        ranks.size,
        ways,
        tokens.axis.size,
        layout,
        panels,
        q.shape[0] * q.shape[1],
        forward + load.gathered_sent,
        backward + load.gathered_sent + load.sums_sent,
        load.gathered,
        load.sums,
        tokens.workspace_bytes(),
        1e3 * seconds,
        1e3 * (seconds - spans.computing),
    )
