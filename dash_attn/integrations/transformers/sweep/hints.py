"""What the general rules of small.py cannot know: sizes that must fit each other in a single family."""

from __future__ import annotations

from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BOTH_KINDS = {"full_attention": ROPE, "sliding_attention": ROPE}

# model_type -> path of a field -> value
HINTS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 7, "context_length": 14},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGAZ": 6}},
    "cohere_compass_text": {"rope_parameters": BOTH_KINDS},
    "cohere_compass": {"text_config.rope_parameters": BOTH_KINDS},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"], "text_config.num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "head_dim": 8, "v_head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 16},
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 16},
    "step3p5": {"sliding_window": 7},
    "step3p7": {"text_config.sliding_window": 7},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "xmod": {"default_language": "en_XX"},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 2},
}
