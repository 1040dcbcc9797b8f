"""The attention function that Transformers' models call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dash_attn.api import attention
from dash_attn.api.arguments import DTYPES
from dash_attn.api.extras import drawn_seed
from dash_attn.backends.dropout import STEP
from dash_attn.integrations.transformers.masks import ModelMask
from dash_attn.integrations.transformers.packing import CallShape, Packed, has_padding, pack, packed_of, take

# Arguments of single models that change the result.
UNSUPPORTED = {
    "position_bias": "a bias on the scores",
    "indices": "attention to chosen tokens",
    "block_indices": "attention to chosen blocks",
    "cache": "a paged cache",
    "block_table": "a paged cache",
    "output_attentions": "returning attention weights",
}
# Tensors that come along with a call and change nothing in the attention, or are read here.
HARMLESS = frozenset(
    {
        "position_ids",
        "s_aux",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "seq_idx",  # the document of each token, for layers that are no attention
        "cache_position",
        "input_ids",
        "inputs_embeds",
        "token_type_ids",
        "num_items_in_batch",
        "labels",
        "shift_labels",
    }
)
ELSEWHERE = "use attn_implementation='eager' for it"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query, key, value (batch, heads, seqlen, dim), fewer heads of keys allowed; gives (batch, seqlen, heads, dim).

    The mask says all, as it does for Transformers' eager attention. Without a mask `is_causal`, else the module's
    attribute, and `sliding_window` say what a query sees. Documents are told apart by `cu_seq_lens_q` and
    `cu_seq_lens_k`, else by the mask and by `position_ids` that start again inside a row. `s_aux` are the sinks of the
    heads. In training, dropout draws one seed from torch's default generator at each call. `deterministic` is as for
    dash_attn.attention, except that a False does not undo torch's flag, and a False from a config asks for nothing.
    """
    dropout = dropout if module.training else 0.0
    _check(module, query, value, dropout, kwargs)
    if isinstance(attention_mask, ModelMask):
        mask = attention_mask
        if mask.refusal is not None:
            raise ValueError(mask.refusal)
        _check_sizes(mask, query, key)
    elif attention_mask is not None:
        raise NotImplementedError(
            f"{_name(module)} got a mask of its own, of shape {tuple(attention_mask.shape)}: dash_attn takes the masks "
            "that Transformers makes from a padding mask (batch, keys), and documents by cu_seq_lens_q or "
            "position_ids; for any other mask use attn_implementation='sdpa'"
        )
    else:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        mask = _implied(module, query, key, causal, sliding_window)
    device = query.device.type
    # Under autocast, or with norms kept in float32, rotated queries and keys are wider than values.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    if dtype not in DTYPES:
        raise ValueError(
            f"{_name(module)} computes in {dtype}, and dash_attn takes {', '.join(DTYPES.values())}: cast the model, "
            f"as with model.float(), or {ELSEWHERE}"
        )
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    options: dict[str, Any] = {
        "scale": scaling,
        "deterministic": _deterministic(module, kwargs.get("deterministic")),
        "softcap": softcap or 0.0,
        "sinks": kwargs.get("s_aux"),
        "dropout": dropout,
    }
    if mask.intervals is not None:
        if kwargs.get("cu_seq_lens_q") is not None:
            raise NotImplementedError(
                f"{_name(module)} has a mask with an interval of keys for each token, and cu_seq_lens_q was given: "
                f"leave it out, or {ELSEWHERE}"
            )
        return _by_rows(mask, (q, k, v), options), None
    if mask.number is not None:
        k, v = (x[:, : mask.number.shape[1]] for x in (k, v))
    # A window as long as the keys is none.
    left, right = (None if x is None or x >= k.shape[1] - 1 else x for x in (mask.left, mask.right))
    if mask.causal:
        right = left  # causality is the nearer limit
    windowed = left is not None or right is not None
    options |= {"causal": mask.causal, "window": (left, right) if windowed else None}
    call = CallShape(q.shape[0], q.shape[1], k.shape[1], mask.causal or windowed, windowed)
    packed = _packed(mask, call, q.device, kwargs)
    if packed is None:
        return attention(q, k, v, **options), None
    out = attention(
        take(q, packed.queries),
        take(k, packed.keys),
        take(v, packed.keys),
        cu_seqlens=packed.cu_q,
        cu_seqlens_k=packed.cu_k,
        **options,
    )
    if packed.queries is not None:
        everything = out.new_zeros(q.shape[0] * q.shape[1], *out.shape[1:])
        out = everything.index_copy(0, packed.queries, out)
    return out.view(*q.shape[:3], v.shape[3]), None


def _deterministic(module: nn.Module, given: bool | None) -> bool | None:
    if torch.are_deterministic_algorithms_enabled():
        return True
    # ModernBERT has the field deterministic_flash_attn, False by default, and gives it to every attention.
    return None if given is False and hasattr(module, "deterministic_flash_attn") else given


def _by_rows(mask: ModelMask, qkv: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> Tensor:
    """Attention with the mask of each batch entry, or with one for all."""
    masks = mask.intervals
    assert masks is not None
    if qkv[0].is_cuda and any(each.rows is not None for each in masks):
        raise NotImplementedError(
            f"{mask.model} has a mask with an interval of keys for each token, for which dash_attn has no forward on "
            "GPUs: use attn_implementation='sdpa' or 'eager' for it"
        )
    if len(masks) == 1:
        out: Tensor = attention(*qkv, mask=masks[0], **options)
        return out
    first = drawn_seed() if options["dropout"] else None
    outs = list[Tensor]()
    for b, each in enumerate(masks):
        seed = None if first is None else first + b * STEP  # as in one call: each batch entry has a seed of its own
        outs.append(attention(*(x[b : b + 1] for x in qkv), mask=each, seed=seed, **options))
    return torch.cat(outs)


def _implied(module: nn.Module, query: Tensor, key: Tensor, causal: bool, window: int | None) -> ModelMask:
    """The mask of a call without one."""
    if window is not None and window < 1:
        raise ValueError(f"sliding_window must be None or at least 1, got {window}")
    if causal and query.shape[2] > 1 and query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"{_name(module)} gives {query.shape[2]} queries, {key.shape[2]} keys and no mask, and dash_attn cannot "
            f"know which key a query is level with; {ELSEWHERE}"
        )
    if window is not None and not causal and window < max(query.shape[2], key.shape[2]):
        raise NotImplementedError(
            f"{_name(module)} gives sliding_window={window} and no mask to an attention that is not causal, where "
            f"Transformers' own implementations disagree on what a query sees; {ELSEWHERE}"
        )
    mask = ModelMask(_name(module), query.shape[0], query.shape[2], key.shape[2], query.device, causal)
    if window is not None:
        mask.left = mask.right = window - 1  # Transformers counts a token itself in
    return mask


def _check_sizes(mask: ModelMask, query: Tensor, key: Tensor) -> None:
    asked = (query.shape[0], query.shape[2], key.shape[2])
    if (mask.batch, mask.len_q, mask.len_k) != asked:
        raise NotImplementedError(
            f"{mask.model} uses a mask for (batch, queries, keys) = {(mask.batch, mask.len_q, mask.len_k)} in a call "
            f"with {asked}, which dash_attn does not do; {ELSEWHERE}"
        )


def _check(module: nn.Module, query: Tensor, value: Tensor, dropout: float, others: dict[str, Any]) -> None:
    if dropout and query.device.type != "cpu":
        raise NotImplementedError(
            f"dropout={dropout}: dash_attn has dropout on CPUs only; set {_dropout_field(module, dropout)}=0.0 in the "
            "config"
        )
    if getattr(getattr(module, "config", None), "output_attentions", False):
        others = {**others, "output_attentions": True}  # not every model hands the field of its config on
    for name, meaning in UNSUPPORTED.items():
        if others.get(name) is not None and others[name] is not False:
            raise NotImplementedError(f"{name} was given: dash_attn does not do {meaning}; {ELSEWHERE}")
    for name, given in others.items():
        if isinstance(given, Tensor) and name not in HARMLESS:
            raise NotImplementedError(
                f"{_name(module)} gives its attention a tensor {name}, which dash_attn does not know; {ELSEWHERE}"
            )
    if value.shape[-1] != query.shape[-1] and query.device.type != "cpu":
        raise NotImplementedError(
            f"value has head dim {value.shape[-1]} and query {query.shape[-1]}: on {query.device.type} dash_attn needs "
            f"them equal; {ELSEWHERE}"
        )


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _dropout_field(module: nn.Module, dropout: float) -> str:
    """The field of the module's own config that has this value, the one that speaks of attention first."""
    config = getattr(module, "config", None)
    fields = [
        name
        for name, value in (config.to_dict() if config is not None else {}).items()
        if "drop" in name and value == dropout
    ]
    return min(
        fields, key=lambda name: (not name.startswith("att"), "att" not in name, name), default="attention_dropout"
    )


def _packed(mask: ModelMask, call: CallShape, device: torch.device, kwargs: dict[str, Any]) -> Packed | None:
    number = mask.number
    if kwargs.get("cu_seq_lens_q") is not None:
        if number is not None and not torch.compiler.is_compiling() and has_padding(number):
            raise ValueError("attention_mask has padding and cu_seq_lens_q was given: leave one out")
        return Packed.given(kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k"))
    # Only where a query looks back do positions that start again mean another document.
    positions = kwargs.get("position_ids") if mask.causal else None
    # Three-dimensional ones are for rotary embeddings of images; a single query is no pack.
    if positions is not None and (positions.ndim != 2 or positions.shape[1] != call.len_q or call.len_q == 1):
        positions = None
    if number is None and positions is None:
        return None
    if torch.compiler.is_compiling():
        sizes = [call.batch, call.len_q, call.len_k]
        return Packed(*pack(number, positions, sizes, call.by_position, call.windowed))
    return packed_of(number, positions, call, device)
