"""Sizes of the models that the tests of the Transformers integration build, and how close on a GPU is close."""

from __future__ import annotations

from typing import Any

from torch import Tensor

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


def as_close_as_eager(dash: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> None:
    """Logits and gradients: half as far again as eager attention of the same dtype, and a little."""
    for what, a, b, want in zip(("logits", "gradients"), dash, eager, exact, strict=True):
        mine, theirs = (float((x - want).norm() / want.norm()) for x in (a, b))
        assert mine < 1.5 * theirs + 1e-3 and mine < 0.1, f"{what}: {mine:.1e}, eager {theirs:.1e}"
