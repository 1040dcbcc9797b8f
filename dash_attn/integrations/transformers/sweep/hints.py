"""What the general rules of small.py cannot know: sizes that must fit each other in a single family."""

from __future__ import annotations

from typing import Any

# model_type -> path of a field -> value
HINTS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 7, "context_length": 14},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 2},
}
