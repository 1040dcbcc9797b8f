"""What the general rules of small.py cannot know: sizes that must fit each other in a single family."""

from __future__ import annotations

from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BOTH_KINDS = {"full_attention": ROPE, "sliding_attention": ROPE}

SERIES = {"prediction_length": 7, "context_length": 7, "lags_sequence": [1, 2, 3, 4, 5, 6, 7], "num_time_features": 1}
# Sparse attention, and embeddings of several tokens, of Qwen4-Exp.
QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 128,
    "split_ngram_parts": 1,
    "hc_lowrank": 8,
}

SAM2 = {
    "vision_config.backbone_config.hidden_size": 96,
    "vision_config.backbone_config.image_size": [128, 128],
    "vision_config.backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    "prompt_encoder_config.image_size": 128,
    "prompt_encoder_config.patch_size": 16,
}
MAMBA = {"n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 16}
RESNET = {"model_type": "resnet", "out_features": ["stage4"]}
TOKENIZER = {"num_filters": 1, "depths": [1] * 7}  # of VibeVoice


def inside(part: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a config inside another."""
    return {f"{part}.{name}": value for name, value in fields.items()}


# model_type -> path of a field -> value
HINTS: dict[str, dict[str, Any]] = {
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
    "nemotron_h": MAMBA,
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
    "blip-2": {"image_token_id": 5, "num_query_tokens": 4},
    "granite4_vision": {"deepstack_layer_map": [(0, 0)], "downsample_rate": "1/2"},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "idefics": {"vision_config.embed_dim": 64, "cross_layer_interval": 1},
    "instructblip": {"image_token_id": 5, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_id": 5, "image_token_id": 5, "num_query_tokens": 4},
    "kosmos-2": {"latent_query_num": 4},
    "llama4_vision_model": {"intermediate_size": 256, "projector_input_dim": 64},
    "lxmert": {"visual_feat_dim": 64},
    "moshi_depth": {"input_size": 64, "num_codebooks": 8},
    "pi0": {"vlm_config.image_token_id": 5},
    "qwen4_exp": inside("text_config", QWEN4),
    "qwen4_exp_text": QWEN4,
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "qwen3_omni_moe": {"talker_config.text_config.shared_expert_intermediate_size": 64},
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 64,
    },
    "seggpt": {"image_size": (64, 32)},
    "sew": {"num_feat_extract_layers": 13},
    "sew-d": {"num_feat_extract_layers": 13},
    "videoprism": {"vision_config.image_size": 32, "vision_config.num_frames": 4},
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "hybrid_layer_ids": [1, 2],
        "num_mem_blocks": 1,
        "num_hidden_layers": 3,
    },
    "blt_local_decoder": {"hidden_size_global": 64},
    "clap": {"audio_config.spec_size": 256, "audio_config.hidden_size": 192},
    "clap_audio_model": {"spec_size": 256},
    "tvp": {"max_img_size": 128, "visual_prompt_size": 8, "num_frames": 1, "frame_num": 1},
    "xcodec": {"codebook_dim": 128, "semantic_model_config.num_feat_extract_layers": 7},
    "vitmatte": {"backbone_config.patch_size": 16, "fusion_hidden_sizes": [256, 128, 64, 32]},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1]},
    "pix2struct": {"text_config.d_kv": 16, "vision_config.d_kv": 16},
    "pix2struct_text_model": {"initializer_range": 0.02, "d_kv": 16},
    "pix2struct_vision_model": {"d_kv": 16},
    "mask2former": {"backbone_config.embed_dim": 96},
    "oneformer": {"backbone_config.embed_dim": 96},
    "grounding-dino": {"backbone_config.embed_dim": 96},
    "mm-grounding-dino": {"backbone_config.embed_dim": 96},
    "superglue": {"keypoint_detector_config.keypoint_decoder_dim": 65},
    "lightglue": {"intermediate_size": 128, "keypoint_detector_config.keypoint_decoder_dim": 65},
    "depth_pro": {"intermediate_hook_ids": [1, 0]},
    "d_fine": {"decoder_in_channels": [64] * 3},
    "pp_doclayout_v2": {"decoder_in_channels": [64] * 3},
    "pp_doclayout_v3": {"x4_feat_dim": 128, "decoder_in_channels": [64] * 3},
    "pp_doclayout_v4": {"decoder_in_channels": [64] * 3},
    "yolos": {"image_size": [32, 32], "num_detection_tokens": 10},
    "swin2sr": {"depths": [2, 2], "num_heads": [2, 2], "num_layers": 2, "image_size": 16},
    "efficientnet": {"hidden_dim": 384, "depth_coefficient": 0.3, "width_coefficient": 0.3},
    "align": {"projection_dim": 96, "vision_config.depth_coefficient": 0.3, "vision_config.width_coefficient": 0.3},
    "edgetam": SAM2,
    "edgetam_video": SAM2,
    "sam2": SAM2,
    "sam2_video": SAM2,
    "sam2_hiera_det_model": {"hidden_size": 96, "image_size": [64, 64]},
    "sam2_vision_model": {
        "backbone_config.hidden_size": 96,
        "backbone_config.image_size": [64, 64],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "perceiver": {"d_latents": 64, "num_latents": 16},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": (2, 7),
        "axial_pos_embds_dim": (32, 32),
        "attn_layers": ["local", "lsh"],
        "num_buckets": 2,
    },
    "phi4_multimodal_audio": {"ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "deepseek_ocr2_vision": {"sam_config.downsample_channels": [64, 64]},
    "xcodec2": {"quantization_dim": 128},
    "neucodec": {"quantization_dim": 128},
    "vibevoice_acoustic_tokenizer": TOKENIZER,
    "vibevoice_acoustic_tokenizer_encoder": TOKENIZER,
    "vibevoice_acoustic_tokenizer_decoder": TOKENIZER,
    "gemma4_assistant": {"backbone_hidden_size": 32},
    "gemma4_unified_assistant": {"backbone_hidden_size": 32},
    "mimi_decoder": {"hidden_size": 64, "upsample_groups": 64},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 64},
    "vits": {"upsample_initial_channel": 32, "upsample_rates": (2, 2), "upsample_kernel_sizes": (4, 4)},
    "pvt": {"image_size": 64, "num_encoder_blocks": 4},
    "blt": {
        "global_config.hidden_size": 128,
        "global_config.head_dim": 32,
        "decoder_config.hidden_size_global": 128,
        "encoder_hash_byte_group_vocab": 500,
    },
    "efficientloftr": {
        "num_key_value_heads": 8,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "head_dim": 32,
        "intermediate_size": 512,
    },
    "janus_vqgan": {"num_patches": 2},
    "pp_formulanet": {"vision_config.post_conv_in_channels": 64},
    "fastspeech2_conformer_with_hifigan": {"vocoder_config.model_in_dim": 80},
    "granite_speech5_ctc": {"encoder_config.num_key_value_heads": 4},
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    "nemo_speechlm": inside("text_config", MAMBA),
    "vibevoice": {**inside("audio_config", TOKENIZER), **inside("semantic_model_config", TOKENIZER)},
    "vibevoice_asr": {
        **inside("acoustic_tokenizer_encoder_config", TOKENIZER),
        **inside("semantic_tokenizer_encoder_config", TOKENIZER),
    },
    "lw_detr": {"projector_scale_factors": [1.0], "num_feature_levels": 1, "num_queries": 4, "group_detr": 2},
    "lw_detr_vit": {"num_hidden_layers": 12},
    "sam3_tracker": {
        "vision_config.backbone_config.image_size": 64,
        "vision_config.backbone_config.patch_size": 8,
        "vision_config.backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
        "prompt_encoder_config.image_size": 64,
        "prompt_encoder_config.patch_size": 8,
    },
    "slanext": {"post_conv_in_channels": 64, "max_text_length": 4},
    "nemotron_h_omni": inside("text_config", MAMBA),
}

# model_type -> arguments of the config class: for configs that are not made without them, and in place of parts that
# need a package (timm)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "autoformer": {**SERIES, "label_length": 7, "moving_average": 3},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "dab-detr": {"use_timm_backbone": False, "backbone_config": RESNET},
    "deformable_detr": {
        "use_timm_backbone": False,
        "backbone_config": {"model_type": "resnet", "out_features": ["stage2", "stage3", "stage4"]},
    },
    "edgetam": {"vision_config": {"model_type": "sam2_vision_model"}},
    "fast_vlm": {"vision_config": {"model_type": "siglip_vision_model"}},
    "informer": SERIES,
    "perception_lm": {"vision_config": {"model_type": "siglip_vision_model", "model_args": {"embed_dim": 64}}},
    "table-transformer": {"use_timm_backbone": False, "backbone_config": RESNET},
    "time_series_transformer": SERIES,
    "uvdoc": {"backbone_config": {"model_type": "uvdoc_backbone", "out_indices": [1, 2, 3, 4, 5, 6]}},
}
