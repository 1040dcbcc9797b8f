"""The core_attention of Megatron Core's transformer layers. It does not import Megatron."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dash_attn.api import attention
from dash_attn.api.calls import read

# Megatron's mask types, by the names of its enum. True means causal.
CAUSAL = {"causal": True, "padding_causal": True, "causal_bottom_right": True, "no_mask": False, "padding": False}
# The masks that count positions from the start of a sequence.
FROM_THE_START = ("causal", "padding_causal")
UNLEVEL = (
    "Megatron counts positions from the start there, dash_attn from the end; use causal_bottom_right if that is meant"
)
SIDES = ("q", "kv")
# Features of a config that are refused: the value that does not use the feature, and the way out.
REFUSED: dict[str, tuple[Any, str]] = {
    "attention_dropout": (0.0, "train with --attention-dropout 0.0"),
    "softmax_type": ("vanilla", "attention sinks need Transformer Engine's attention"),
    "fp8_dot_product_attention": (False, "leave fp8 to the linear layers"),
    "qk_clip": (False, "it needs the largest score, which is not kept"),
    "log_max_attention_logit": (False, "it needs the largest score, which is not kept"),
}


# Megatron's ways to share the tokens of a sequence, and ours that stand in for them.
MODES = {"a2a": "a2a", "all_gather": "all_gather"}


class DashCoreAttention(nn.Module):
    """dash_attn.attention in place of DotProductAttention or TEDotProductAttention. It has no weights.

    Query, key and value are (seqlen, batch, heads, dim), or (tokens, heads, dim) with packed_seq_params. The result is
    (seqlen, batch, heads * dim) or (tokens, heads * dim). Key and value may have fewer heads than query. With tensor
    parallelism, the module gets the heads of its rank. With context parallelism it gets the tokens of its rank, which
    Megatron cuts as the layout 'zigzag' does. `deterministic_mode` in the config keeps the order. Without it the
    process decides.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__()
        if k_channels != v_channels:
            raise NotImplementedError(
                f"k_channels={k_channels} and v_channels={v_channels} (multi-latent attention): dash_attn needs values "
                "with the head dim of queries; use Transformer Engine's attention"
            )
        asked = {name: getattr(config, name, nothing) for name, (nothing, _) in REFUSED.items()}
        if attention_dropout is not None:
            asked["attention_dropout"] = attention_dropout
        for name, (nothing, way_out) in REFUSED.items():
            if asked[name] != nothing:
                raise NotImplementedError(f"{name}={asked[name]!r}: dash_attn has no kernel for it; {way_out}")
        self.shared = _shared(config, cp_comm_type, pg_collection)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.window = _window(config, max(1, layer_number))
        self.deterministic = True if getattr(config, "deterministic_mode", False) else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        kind = (attn_mask_type or self.attn_mask_type).name
        if attention_bias is not None:
            raise NotImplementedError(
                "attention_bias was given: dash_attn adds none; use Transformer Engine's attention"
            )
        if kind not in CAUSAL:
            raise NotImplementedError(f"attn_mask_type {kind}: dash_attn has {', '.join(CAUSAL)}")
        if attention_mask is not None:
            # The tensor may be a plain causal mask, but reading it would wait for the GPU in every layer.
            raise NotImplementedError(
                "attention_mask was given: dash_attn masks by attn_mask_type and packed_seq_params alone; leave it out "
                "(--no-create-attention-mask-in-dataloader), and pack documents instead of resetting the mask"
            )
        options: dict[str, Any] = {
            "causal": CAUSAL[kind],
            "window": self.window,
            "scale": self.softmax_scale,
            "deterministic": self.deterministic,
        }
        if packed_seq_params is not None:
            if self.shared is not None:
                raise NotImplementedError(
                    "packed_seq_params with context parallelism: Megatron cuts each sequence, and dash_attn the whole "
                    "pack; use --context-parallel-size 1"
                )
            cu_q, cu_k = _boundaries(packed_seq_params, kind)
            out: Tensor = attention(query, key, value, cu_seqlens=cu_q, cu_seqlens_k=cu_k, **options)
            return out.flatten(1)
        if kind.startswith("padding"):
            raise NotImplementedError(f"attn_mask_type {kind} without packed_seq_params: pack sequences as thd")
        if kind == "causal" and query.shape[0] != key.shape[0]:
            raise NotImplementedError(f"causal with {query.shape[0]} queries and {key.shape[0]} keys: {UNLEVEL}")
        rows = [x.transpose(0, 1) for x in (query, key, value)]
        if self.shared is None:
            out = attention(*rows, **options)
        else:
            from dash_attn.distributed import context_parallel_attention  # takes time to import, and few need it

            out = context_parallel_attention(*rows, **(self.shared | options))
        return out.transpose(0, 1).contiguous().flatten(2)


def _shared(config: Any, cp_comm_type: str | None, groups: Any) -> dict[str, Any] | None:
    """The arguments of context_parallel_attention, or None if a rank has all tokens."""
    if getattr(config, "context_parallel_size", 1) == 1:
        return None
    if cp_comm_type not in MODES:
        raise NotImplementedError(
            f"cp_comm_type is {cp_comm_type!r}: dash_attn has no ring, whose bits depend on the number of ranks; use "
            f"--cp-comm-type {' or '.join(MODES)}"
        )
    if getattr(groups, "cp", None) is None:
        raise ValueError("pg_collection has no cp, the process group of the ranks that share a sequence")
    return {"group": groups.cp, "mode": MODES[cp_comm_type]}


def _window(config: Any, layer: int) -> tuple[int, int] | None:
    """The window of a layer, numbered from 1. `window_attn_skip_freq` names layers without one: a step or a list."""
    sides, skip = getattr(config, "window_size", None), getattr(config, "window_attn_skip_freq", None)
    if not sides:
        return None
    narrow = True if skip is None else layer % skip != 0 if isinstance(skip, int) else bool(skip[layer - 1])
    return tuple(sides) if narrow else None


def _boundaries(packed: Any, kind: str) -> tuple[Tensor, Tensor]:
    """The ends of the sequences, with the padding behind each. A causal mask hides the padding from real queries."""
    if packed.qkv_format != "thd":
        raise NotImplementedError(f"packed_seq_params.qkv_format is {packed.qkv_format!r}: dash_attn takes 'thd'")
    real: list[Tensor] = [getattr(packed, f"cu_seqlens_{side}") for side in SIDES]
    padded: list[Tensor | None] = [getattr(packed, f"cu_seqlens_{side}_padded", None) for side in SIDES]
    ends = [x if y is None else y for x, y in zip(real, padded, strict=True)]
    for side, own, all_of_it in zip(SIDES, real, ends, strict=True):
        if not CAUSAL[kind] and not _equal(own, all_of_it):
            raise NotImplementedError(
                f"packed_seq_params.cu_seqlens_{side}_padded has padding, which only a causal mask hides: leave it out"
            )
    if kind in FROM_THE_START and not _equal(*real):
        raise NotImplementedError(f"{kind} with other packed_seq_params.cu_seqlens_q than cu_seqlens_kv: {UNLEVEL}")
    same = real[0] is real[1] and ends[0] is ends[1]  # as in self-attention: nothing is read then
    if CAUSAL[kind] and not same and _padding(real[0], ends[0]) != _padding(real[1], ends[1]):
        raise NotImplementedError(
            "packed_seq_params.cu_seqlens_q_padded has other padding than cu_seqlens_kv_padded, which moves queries "
            "against keys: pad both alike"
        )
    return ends[0], ends[1]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or read(a) == read(b)


def _padding(real: Tensor, ends: Tensor) -> list[int]:
    return [end - own for own, end in zip(read(real), read(ends), strict=False)]
