"""Sizes of the models that the tests of the Transformers integration build."""

from __future__ import annotations

from typing import Any

LENGTH = 33  # tokens
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
