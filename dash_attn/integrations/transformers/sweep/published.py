"""Head dims at the sizes that a family is published with: those of its default config."""

from __future__ import annotations

from typing import Any

from dash_attn.integrations.transformers.checking import gpu_obstacle, head_dims
from dash_attn.integrations.transformers.sweep.families import config_class

WIDTHS = ("d_model", "embed_dim", "n_embd", "hidden_size", "hidden_dim", "encoder_hidden_dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads", "n_heads")


def gpu_cell(family: str) -> str:
    """Whether the GPU backend takes the head dims; nothing is run for it."""
    try:
        dims = sorted(set(_dims(config_class(family)())))
    except Exception:  # a config that must be told what it is made of
        dims = []
    if not dims:
        return "not known"
    obstacles = [x for pair in dims if (x := gpu_obstacle(pair)) is not None]
    shown = ", ".join(str(q) if q == v else f"{q}/{v}" for q, v in dims)
    return f"{'no' if obstacles else 'yes'}: {shown}"


def _dims(config: Any) -> list[tuple[int, int]]:
    """Of a config and of those inside it."""
    from transformers import PreTrainedConfig

    inner = [x for x in vars(config).values() if isinstance(x, PreTrainedConfig)]
    own = head_dims(config) or _by_width(config)
    return ([] if own is None else [own]) + [dims for each in inner for dims in _dims(each)]


def _by_width(config: Any) -> tuple[int, int] | None:
    width, heads = (_first(config, names) for names in (WIDTHS, HEADS))
    return None if not width or not heads else (width // heads, width // heads)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((x for x in values if isinstance(x, int) and x > 0), None)
