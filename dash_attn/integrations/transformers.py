"""attn_implementation="dash" for the models of Hugging Face Transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from dash_attn.api import attention

# What the attention can follow from is_causal, sliding_window and the mask below, by the names Transformers gives it.
KNOWN_MASKS = frozenset(
    {
        "causal_mask_function",
        "bidirectional_mask_function",
        "sliding_window_overlay",
        "sliding_window_bidirectional_overlay",
        "packed_sequence_mask_function",
    }
)
# Arguments of single models that change the result.
UNSUPPORTED = {
    "s_aux": "attention sinks",
    "position_bias": "a bias on the scores",
    "indices": "attention to chosen tokens",
    "block_indices": "attention to chosen blocks",
    "cache": "a paged cache",
    "block_table": "a paged cache",
    "output_attentions": "returning attention weights",
}


def register(name: str = "dash") -> None:
    """Make `attn_implementation=name` mean dash_attn, for models built or loaded from now on. Again does no harm."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("Transformers 5 or later is needed: pip install 'dash-attn[hf]'") from error
    if "flash" in name:
        raise ValueError(f"name must not contain 'flash', which Transformers takes for its own kernels; got {name!r}")
    # Without the mask function Transformers would leave out the padding mask, and say nothing.
    pairs = ((AttentionInterface(), attention_forward), (AttentionMaskInterface(), padding_mask))
    for interface, ours in pairs:
        if interface.get(name, ours) is not ours:
            raise ValueError(f"{name!r} is already the name of another attention; choose one of your own")
    for interface, ours in pairs:
        interface.register(name, ours)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """None, or (batch, keys): 0 for padding and else the number of the document that a token belongs to.

    It may be shorter than the keys, which then end in places of a static cache that nothing was written to yet.
    """
    parts = dict(_parts(mask_function)) if mask_function is not None else {}
    unknown = parts.keys() - KNOWN_MASKS
    if unknown:
        raise NotImplementedError(
            f"this model masks with {', '.join(sorted(unknown))}, which dash_attn does not know: "
            "use attn_implementation='sdpa' or 'eager' for it"
        )
    mask = attention_mask
    if "packed_sequence_mask_function" in parts:
        # From here and not from position_ids, since not every model hands those on to its attention.
        document = inspect.getclosurevars(parts["packed_sequence_mask_function"]).nonlocals["packed_sequence_mask"]
        mask = document.to(torch.int64) + 1
    if mask is not None:
        mask = mask[:, kv_offset : kv_offset + kv_length]
    if "causal_mask_function" in parts:
        seen = int(q_offset) + q_length - kv_offset
        if mask is None and seen < kv_length:
            mask = torch.ones(batch_size, seen, dtype=torch.bool, device=kwargs.get("device"))
        elif mask is not None:
            if mask.shape[1] < seen:
                raise ValueError(
                    f"attention_mask must cover all tokens so far, those in the cache too: {seen + kv_offset}; "
                    f"got {mask.shape[1] + kv_offset}"
                )
            mask = mask[:, :seen]
    if mask is not None and mask.dtype == torch.bool and mask.shape[1] == kv_length and bool(mask.all()):
        return None
    return mask


def _parts(mask_function: Callable[..., Any]) -> list[tuple[str, Callable[..., Any]]]:
    """What a mask function is the intersection of, each with the name of what made it."""
    name = mask_function.__qualname__.partition(".<locals>")[0]
    if name == "and_masks":
        every = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
        return [part for each in every for part in _parts(each)]
    return [(name, mask_function)]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query, key, value (batch, heads, seqlen, dim), fewer heads of keys allowed; gives (batch, seqlen, heads, dim).

    Documents are told apart by `cu_seq_lens_q` and `cu_seq_lens_k`, else by the mask and by `position_ids` that start
    again inside a row. `deterministic` is as for dash_attn.attention, except that a False does not undo torch's flag:
    there are models that pass it without having been asked.
    """
    _check(module, query, value, dropout, sliding_window, {**kwargs, "softcap": softcap})
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    device = query.device.type
    # Under autocast, or with norms kept in float32, rotated queries and keys are wider than values.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    if attention_mask is not None:
        attention_mask = _checked_mask(attention_mask, q, k)
        k, v = (x[:, : attention_mask.shape[1]] for x in (k, v))
    # Transformers counts a token itself in.
    reach = sliding_window - 1 if sliding_window is not None and k.shape[1] > sliding_window else None
    options: dict[str, Any] = {
        "causal": causal,
        "window": None if reach is None else (reach, reach),
        "scale": scaling,
        "deterministic": True if torch.are_deterministic_algorithms_enabled() else kwargs.get("deterministic"),
    }
    by_position = causal or reach is not None
    packed = _packed(q, k, attention_mask, by_position, kwargs)
    if packed is None:
        return attention(q, k, v, **options), None
    out = attention(
        _take(q, packed.queries),
        _take(k, packed.keys),
        _take(v, packed.keys),
        cu_seqlens=packed.cu_q,
        cu_seqlens_k=packed.cu_k,
        **options,
    )
    if packed.queries is not None:
        everything = out.new_zeros(q.shape[0] * q.shape[1], *out.shape[1:])
        out = everything.index_copy(0, packed.queries, out)
    return out.view(q.shape), None


def _check(
    module: nn.Module, query: Tensor, value: Tensor, dropout: float, window: int | None, others: dict[str, Any]
) -> None:
    elsewhere = "use attn_implementation='eager' for it"
    if dropout and module.training:
        raise NotImplementedError(
            f"dropout={dropout}: dash_attn has no dropout; set attention_dropout=0.0 in the config"
        )
    if others["softcap"] is not None:
        raise NotImplementedError(f"softcap={others['softcap']}: dash_attn does not cap scores; {elsewhere}")
    for name, meaning in UNSUPPORTED.items():
        if others.get(name) is not None and others[name] is not False:
            raise NotImplementedError(f"{name} was given: dash_attn does not do {meaning}; {elsewhere}")
    if value.shape[-1] != query.shape[-1]:
        raise NotImplementedError(
            f"value has head dim {value.shape[-1]} and query {query.shape[-1]}: dash_attn needs them equal; {elsewhere}"
        )
    if window is not None and window < 1:
        raise ValueError(f"sliding_window must be None or at least 1, got {window}")


def _checked_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    if mask.ndim != 2:
        raise NotImplementedError(
            f"attention_mask has shape {tuple(mask.shape)}: dash_attn takes a padding mask (batch, keys), or documents "
            "by cu_seq_lens_q or position_ids; for any other mask use attn_implementation='sdpa'"
        )
    if mask.shape[0] != q.shape[0] or mask.shape[1] > k.shape[1]:
        raise ValueError(
            f"attention_mask must be (batch, keys) = {(q.shape[0], k.shape[1])}, or shorter where a static cache is "
            f"not full; got {tuple(mask.shape)}"
        )
    return mask


@dataclass(frozen=True)
class Packed:
    """Documents one after another: where their tokens are in the flattened batch (None: all, in order) and end."""

    queries: Tensor | None
    keys: Tensor | None
    cu_q: Tensor | list[int]
    cu_k: Tensor | list[int] | None


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    flat = x.flatten(0, 1)
    return flat if index is None else flat.index_select(0, index)


def _packed(q: Tensor, k: Tensor, mask: Tensor | None, by_position: bool, kwargs: dict[str, Any]) -> Packed | None:
    """None if all rows are whole sequences of their own.

    `by_position`: which keys a query sees depends on where it is. Then padding goes from queries too, or they would no
    longer be level with their keys. Otherwise all stay: the mask may be of keys that come from somewhere else.
    """
    given = (kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    cu_q, cu_k = (x.int() if isinstance(x, Tensor) else x for x in given)  # Transformers calls them long
    if cu_q is not None:
        if mask is not None and not bool(mask.all()):
            raise ValueError("attention_mask has padding and cu_seq_lens_q was given: leave one out")
        return Packed(None, None, cu_q, cu_k)
    batch, len_q, len_k = q.shape[0], q.shape[1], k.shape[1]
    positions = kwargs.get("position_ids")
    # Three-dimensional ones are for rotary embeddings of images; a single query is no pack.
    if positions is not None and (positions.ndim != 2 or positions.shape[1] != len_q or len_q == 1):
        positions = None
    if mask is None and positions is None:
        return None
    # On the CPU, so that a GPU is waited for once and not at every step.
    number = torch.ones(batch, len_k, dtype=torch.int64) if mask is None else mask.to("cpu", torch.int64)
    if positions is not None:
        positions = positions.expand(batch, -1).cpu()
    if len_q == len_k:
        tokens = number.flatten().nonzero().flatten()
        starts, packed = _starts(tokens, number, positions)
        if packed or (by_position and len(tokens) < batch * len_k):
            index = _index(tokens, q)
            return Packed(index, index, [0, *starts, len(tokens)], None)
    elif len_q > len_k and by_position and mask is not None:
        raise ValueError(f"attention_mask is for {len_k} keys, fewer than the {len_q} queries")
    real = number[:, -len_q:] if by_position and mask is not None else torch.ones(batch, len_q, dtype=torch.int64)
    queries = real.flatten().nonzero().flatten()
    if len_q != len_k and (int(number.max()) > 1 or _starts(queries, real, positions)[1]):
        raise NotImplementedError(
            f"several documents in a row of {len_q} queries and {len_k} keys: pass cu_seq_lens_q and cu_seq_lens_k"
        )
    if bool(number.all()):
        return None
    keys = number.flatten().nonzero().flatten()
    cu_q, cu_k = ([0, *accumulate(x.count_nonzero(1).tolist())] for x in (real, number))
    return Packed(_index(queries, q), _index(keys, k), cu_q, cu_k)


def _index(tokens: Tensor, x: Tensor) -> Tensor | None:
    return None if len(tokens) == x.shape[0] * x.shape[1] else tokens.to(x.device)


def _starts(tokens: Tensor, number: Tensor, positions: Tensor | None) -> tuple[list[int], bool]:
    """Which of `tokens` begin a document, the first left out, and whether any does so inside a row.

    Positions that fall, or stay at the lowest, begin another document. Gaps do not: padding leaves them too.
    """
    row = tokens // max(1, number.shape[1])
    inside = number.flatten()[tokens].diff() != 0
    if positions is not None and len(tokens):
        position = positions.flatten()[tokens]
        inside |= (position.diff() < 0) | (position[1:] == position.min())
    next_row = row.diff() != 0
    starts = ((inside | next_row).nonzero().flatten() + 1).tolist()
    return starts, bool((inside & ~next_row).any())
