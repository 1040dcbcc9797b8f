"""What the general rules of small.py cannot know: sizes that must fit each other in a single family."""

from __future__ import annotations

from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BOTH_KINDS = {"full_attention": ROPE, "sliding_attention": ROPE}

# model_type -> path of a field -> value
HINTS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 7, "context_length": 14},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGAZ": 6}},
    "cohere_compass_text": {"rope_parameters": BOTH_KINDS},
    "cohere_compass": {"text_config.rope_parameters": BOTH_KINDS},
    "dbrx": {"attn_config.rope_theta": 10000.0},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "emu3": {"pad_token_id": 0},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 2},
}
