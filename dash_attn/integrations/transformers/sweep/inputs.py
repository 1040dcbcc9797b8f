"""Inputs for a model of which only the config and the signature of forward are known."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dash_attn.integrations.transformers.sweep.given import GIVEN

BATCH, LENGTH, FIRST_DOCUMENT = 2, 14, 5
FIRST_WORD = 70  # ids below are special tokens


def arguments(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def has_cache(model: Any) -> bool:
    """Whether forward takes use_cache among its further arguments."""
    configs = (model.config, getattr(model.config, "text_config", None))
    return "kwargs" in arguments(model) and any(hasattr(config, "use_cache") for config in configs)


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs to try one after another: those that are known for the family, then text, images, sound and others."""
    names = arguments(model)
    yield from _known(model)
    text: dict[str, Tensor] = {"input_ids": words(model, LENGTH)} if "input_ids" in names else {}
    decoder: dict[str, Tensor] = (
        {"decoder_input_ids": words(model, LENGTH, "decoder")} if "decoder_input_ids" in names else {}
    )
    if text:
        if "bbox" in names:
            text["bbox"] = torch.arange(4).expand(BATCH, LENGTH, 4)
        yield {**text, **decoder}
        yield text
    for name in ("pixel_values", "images"):
        if name in names:
            for shape in _images(model):
                image: dict[str, Tensor] = {name: random(*shape)}
                yield {**image, **decoder}
                yield {**image, **text}
    for name in ("input_values", "input_features", "audio_values"):
        if name in names:
            for shape in _sounds(model):
                sound: dict[str, Tensor] = {name: random(*shape)}
                yield {**sound, **decoder}
                yield {**sound, **text}
    for name in ("pixel_values_videos", "pixel_values"):
        if name in names:
            for shape in _videos(model):
                yield {name: random(*shape)}
                yield {name: random(*shape), **text}
    for name in ("hidden_states", "inputs_embeds", "embeddings"):
        if name in names:
            yield {name: random(BATCH, LENGTH, width(model))}
    for name in names & {"query_embeds", "pixel_values", "hidden_states"}:
        if "grid_thw" in names:
            yield {name: _patches(model), "grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}
        if "image_grid_thw" in names:
            yield {name: _patches(model), "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}
    if "query_embeds" in names:
        states = random(BATCH, LENGTH, getattr(model.config, "encoder_hidden_size", 64))
        yield {"query_embeds": random(BATCH, LENGTH, width(model)), "encoder_hidden_states": states}
        yield {"query_embeds": random(BATCH, LENGTH, width(model))}
    if {"input_features", "input_features_mask"} <= names:
        for shape in _sounds(model):
            if len(shape) == 3:
                for length in shape[1:]:
                    yield {"input_features": random(*shape), "input_features_mask": torch.ones(BATCH, length).long()}
    if "past_values" in names:
        length = getattr(model.config, "context_length", LENGTH)
        channels = getattr(model.config, "num_input_channels", 1)
        yield {"past_values": random(BATCH, length, channels)}
        yield {"past_values": random(BATCH, length)}


def _known(model: Any) -> Iterator[dict[str, Any]]:
    names = arguments(model)
    written = GIVEN.get(model.config.model_type, {})
    taken = {name: _tensor(x) for name, x in written.items() if name in names}
    if taken:
        yield taken
    if len(taken) < len(written) and "kwargs" in names:
        yield {name: _tensor(x) for name, x in written.items()}


def _tensor(written: Any) -> Any:
    """What is written in GIVEN, with tensors for shapes and lists."""
    if isinstance(written, dict):
        return {name: _tensor(x) for name, x in written.items()}
    if isinstance(written, tuple):
        return tuple(map(_tensor, written)) if isinstance(written[0], tuple) else random(*written)
    return torch.tensor(written) if isinstance(written, list) else written


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def words(model: Any, length: int, part: str = "") -> Tensor:
    config = model.config
    for inner in (getattr(config, part, None) if part else None, getattr(config, "text_config", None), config):
        size = getattr(inner, "vocab_size", None)
        if isinstance(size, int):
            break
    else:
        size = 100
    first = FIRST_WORD if size > FIRST_WORD + 8 else 0
    return torch.randint(first, size, (BATCH, length), generator=torch.Generator().manual_seed(1))


def width(model: Any) -> int:
    for config in (model.config, getattr(model.config, "text_config", None)):
        for name in ("hidden_size", "d_model", "embed_dim", "hidden_dim"):
            if isinstance(getattr(config, name, None), int):
                return int(getattr(config, name))
    return 64


def _images(model: Any) -> Iterator[tuple[int, ...]]:
    configs = [model.config, *(getattr(model.config, x, None) for x in ("vision_config", "backbone_config", "encoder"))]
    channels = next((c.num_channels for c in configs if isinstance(getattr(c, "num_channels", None), int)), 3)
    sizes = [getattr(c, "image_size", None) for c in configs]
    for size in dict.fromkeys([*(tuple(s) if isinstance(s, list | tuple) else s for s in sizes if s), 32, 64, 224]):
        if isinstance(size, dict):
            size = (size.get("height"), size.get("width"))
        height, wide = size if isinstance(size, tuple) else (size, size)
        if isinstance(height, int) and isinstance(wide, int):
            yield BATCH, channels, height, wide


def _patches(model: Any) -> Tensor:
    """Images cut into patches already, one after another."""
    config = model.config
    size = getattr(config, "patch_size", 8)
    deep = getattr(config, "temporal_patch_size", 1)
    channels = getattr(config, "in_channels", getattr(config, "in_chans", getattr(config, "num_channels", 3)))
    return random(BATCH * 16, channels * deep * size * size)


def _videos(model: Any) -> Iterator[tuple[int, ...]]:
    for _, channels, height, wide in _images(model):
        frames = getattr(model.config, "num_frames", 8)
        yield BATCH, frames, channels, height, wide
        yield BATCH, channels, frames, height, wide


def _sounds(model: Any) -> Iterator[tuple[int, ...]]:
    configs = [model.config, *(getattr(model.config, x, None) for x in ("audio_config", "encoder_config", "encoder"))]
    mels = [
        getattr(c, name)
        for c in configs
        for name in (
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "input_dim",
            "feature_projection_input_dim",
        )
        if isinstance(getattr(c, name, None), int)
    ]
    frames = [2 * c.max_source_positions for c in configs if isinstance(getattr(c, "max_source_positions", None), int)]
    for mel in dict.fromkeys([*mels, 80]):
        for length in dict.fromkeys([*frames, 64, 128, 1024]):
            yield BATCH, mel, length
            yield BATCH, length, mel
    yield BATCH, 8000
    yield BATCH, 1, 8000
