"""A config of any family made small: few layers, narrow, a short vocabulary, and no dropout."""

from __future__ import annotations

import re
from typing import Any

from dash_attn.integrations.transformers.sweep.families import config_class
from dash_attn.integrations.transformers.sweep.hints import ARGUMENTS, HINTS

WIDTH = 64
HEADS = 4
HEAD_DIM = 16
VOCABULARY = 128
WINDOW = 7
IMAGE, PATCH = 32, 8

LAYERS = re.compile(r"^(n_layers?|depth|.*num_.*layers|.*_layers|n_.*layers?|num_layers.*|num_.*blocks)$")
HEADS_OF = re.compile(r"^(.*num_.*heads?|n_heads?|.*_attention_heads|num_heads)$")
WIDE = re.compile(
    r"(size|dim|width|embd|channels|rank|d_model|d_ff|d_kv|d_inner|n_inner|intermediate|conv_dim|features)$"
)
NARROW = re.compile(
    r"(vocab|patch|image|kernel|group|window|chunk|block|batch|queue|codebook_size|head_dim|num_|shape|spatial|"
    r"temporal|mel|in_channels|num_channels|max_|input_size|stride|expert|conv_size|n_ctx|crop|pool)"
)
EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts)$")
CHOSEN = re.compile(r"(per_tok|top_?k|per_token|moe_k)$")
GROUPS = re.compile(r"^(n_group|topk_group|num_expert_groups?|n_groups_used)$")
TOKEN = re.compile(r"_(token_?id|token_?index|token_?ids|id)$")


def small_config(family: str, narrow: bool = True) -> Any:
    return shrink(config_class(family)(**ARGUMENTS.get(family, {})), narrow)


def shrink(config: Any, narrow: bool = True) -> Any:
    """The config itself, changed. With `narrow=False` widths stay, for families whose sizes depend on each other."""
    _shrink(config, narrow, iter(range(2, VOCABULARY // 2)))
    for path, value in HINTS.get(config.model_type, {}).items():
        owner, *names = config, *path.split(".")
        for name in names[:-1]:
            owner = getattr(owner, name)
        setattr(owner, names[-1], value)
    return config


def _shrink(config: Any, narrow: bool, free_ids: Any, backbone: bool = False) -> None:
    from transformers import PreTrainedConfig

    fields = {name: value for name in config.to_dict() if (value := _field(config, name)) is not None}
    # A model around a backbone takes the outputs of some of its layers, by their numbers.
    staged = len(getattr(config, "out_indices", None) or ()) > (0 if backbone else 1)
    layers = None if staged else _kept_layers(config, fields)
    nope, rope, value_dim = (fields.get(f"{name}_head_dim", 0) for name in ("qk_nope", "qk_rope", "v"))
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            _shrink(value, narrow, free_ids, "backbone" in name)
            continue
        if staged and LAYERS.match(name):
            continue
        small = _small(name, value, narrow, free_ids)
        if isinstance(value, list | tuple) and layers and len(value) == layers[0] and layers[0] > len(layers[1]):
            small = type(value)(value[i] for i in layers[1])
        if small is not value:
            try:
                setattr(config, name, small)
            except Exception:  # a property without a setter, or a check that this value does not pass
                continue
    if narrow:
        _fill(config)
        if rope and nope + rope == value_dim:
            # Equal head dims of queries and values stay equal.
            config.v_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    for name in ("rope_parameters", "rope_scaling"):
        if narrow and isinstance(fields.get(name), dict):
            setattr(config, name, _rotary(fields[name]))
    if layers:
        for name in fields:
            if LAYERS.match(name) and fields[name] == layers[0]:
                setattr(config, name, len(layers[1]))


def _fill(config: Any) -> None:
    """Sizes that published configs give and default configs leave open."""
    written = config.to_dict()
    if "head_dim" in written and written["head_dim"] is None:
        config.head_dim = HEAD_DIM
    if "num_key_value_heads" in written and written["num_key_value_heads"] is None:
        config.num_key_value_heads = config.num_attention_heads


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a field that differs from layer to layer
        return None


def _rotary(parameters: dict[str, Any]) -> dict[str, Any]:
    """Sections of the rotary dimensions, for positions in time, height and width, add up to half of them."""
    if "rope_theta" not in parameters:  # one set of parameters for each kind of layer
        return {kind: _rotary(x) if isinstance(x, dict) else x for kind, x in parameters.items()}
    sections = parameters.get("mrope_section", [1, 1, 1])
    half = int(HEAD_DIM * parameters.get("partial_rotary_factor", 1.0)) // 2
    share = [max(1, half * x // sum(sections)) for x in sections]
    return {**parameters, "mrope_section": [*share[:-1], half - sum(share[:-1])]}


def _kept_layers(config: Any, fields: dict[str, Any]) -> tuple[int, list[int]] | None:
    """How many layers there are, and which stay: the first of every kind, and at least two."""
    number = getattr(config, "num_hidden_layers", None)
    if not isinstance(number, int):
        return None
    kinds = next((v for k, v in fields.items() if k in ("layer_types", "layers_block_type") and v), None)
    if not kinds or len(kinds) != number:
        return number, list(range(min(2, number)))
    first = sorted({kinds.index(kind) for kind in kinds})
    return number, first if len(first) > 1 else list(range(min(2, number)))


def _small(name: str, value: Any, narrow: bool, free_ids: Any) -> Any:
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if isinstance(value, bool) or value is None or isinstance(value, str | dict):
        return value
    if TOKEN.search(name) and isinstance(value, int) and value >= VOCABULARY:
        return next(free_ids)
    if TOKEN.search(name) and isinstance(value, list | tuple):
        return type(value)(next(free_ids) if isinstance(x, int) and x >= VOCABULARY else x for x in value)
    if not isinstance(value, int):
        return value
    if "vocab_size" in name or name in ("num_embeddings", "codebook_size"):
        return min(value, VOCABULARY)
    if LAYERS.match(name):
        return min(value, 2)
    if EXPERTS.match(name):
        return min(value, 4)
    if CHOSEN.search(name):
        return min(value, 2)
    if name in ("sliding_window", "sliding_window_size"):
        return min(value, WINDOW)
    if "max" in name and "position" in name:
        return min(value, 256)
    if GROUPS.match(name):
        return 1
    if "chunk_size" in name and "attention" not in name:
        return min(value, 8)
    return _narrow(name, value) if narrow else value


def _narrow(name: str, value: int) -> int:
    if "head_dim" in name:
        return min(value, HEAD_DIM)
    if name == "rotary_dim":
        return min(value, HEAD_DIM // 2)
    if HEADS_OF.match(name):
        fewer = "key_value" in name or "kv" in name
        return min(value, 2 if fewer and value < 16 else HEADS)
    if name == "image_size":
        return min(value, IMAGE)
    if name == "patch_size":
        return min(value, PATCH)
    if WIDE.search(name) and not NARROW.search(name):
        return min(value, WIDTH)
    return value
