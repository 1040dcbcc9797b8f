"""Inputs that the general rules of inputs.py cannot know, by family."""

from __future__ import annotations

from typing import Any

BOTH = 2  # rows of a batch
WORDS = [list(range(70, 84)), list(range(84, 98))]
ONES = [[1] * 14] * BOTH
GRID = [[1, 4, 4]] * BOTH
CORNERS = [[[x, y] for y in range(4) for x in range(4)]] * BOTH
IMAGE = (BOTH, 3, 32, 32)
# Row, column and colours of each patch.
PATCHES = [[[1.0 + i // 4, 1.0 + i % 4, *((i * 7 + j) % 11 / 5 - 1 for j in range(768))] for i in range(16)]] * BOTH
SHARED = {kind: ((BOTH, 2, 14, 256),) * 2 for kind in ("full_attention", "sliding_attention")}


def pictures(token: int, number: int) -> list[list[int]]:
    """Token ids: places for an image first, then words."""
    return [[token] * number + row for row in WORDS]


# model_type -> argument -> a shape (a tuple: random numbers), a tensor (a list), or a value
GIVEN: dict[str, dict[str, Any]] = {
    "autoformer": {
        "past_values": (BOTH, 14),
        "past_time_features": (BOTH, 14, 1),
        "past_observed_mask": ONES,
        "future_values": (BOTH, 7),
        "future_time_features": (BOTH, 7, 1),
    },
    "blip-2": {"pixel_values": IMAGE, "input_ids": pictures(5, 4)},
    "blt_local_decoder": {"inputs_embeds": (BOTH, 14, 64), "patch_embeds": (BOTH, 14, 64)},
    "bridgetower_vision_model": {"image": IMAGE},
    "clap": {"input_ids": WORDS, "input_features": (BOTH, 1, 1024, 64)},
    "clap_audio_model": {"input_features": (BOTH, 1, 1024, 64)},
    "efficientloftr": {"pixel_values": (1, BOTH, 3, 64, 64)},
    "florence_vision": {"hidden_states": (BOTH, 3, 64, 64)},
    "fun_asr_nano_encoder": {"input_features": (BOTH, 20, 560), "input_features_mask": [[1] * 20] * BOTH},
    "gemma3n_audio": {"audio_mel": (BOTH, 64, 64), "audio_mel_mask": [[False] * 64] * BOTH},
    "gemma4_vision": {"pixel_values": (BOTH, 16, 192), "pixel_position_ids": CORNERS},
    "gemma4_assistant": {"inputs_embeds": (BOTH, 14, 64), "shared_kv_states": SHARED},
    "gemma4_unified_assistant": {"inputs_embeds": (BOTH, 14, 64), "shared_kv_states": SHARED},
    "musicgen": {"input_ids": WORDS, "decoder_input_ids": WORDS * 4},
    "musicgen_melody": {"input_ids": WORDS, "decoder_input_ids": WORDS * 4},
    "pvt": {"pixel_values": (BOTH, 3, 64, 64)},
    "vibevoice_acoustic_tokenizer_encoder": {"hidden_states": (BOTH, 1, 6400)},
    "vibevoice_acoustic_tokenizer_decoder": {"hidden_states": (BOTH, 64, 3)},
    "mimi_decoder": {"latents": (BOTH, 64, 14)},
    "pocket_tts_audio_tokenizer_decoder": {"latents": (BOTH, 64, 14)},
    "fastspeech2_conformer_with_hifigan": {"input_ids": [[*range(1, 15)]] * BOTH},
    "blt": {"input_ids": WORDS, "use_cache": False},
    "blt_local_encoder": {"input_ids": WORDS, "patch_ids": [[i // 2 for i in range(14)]] * BOTH, "num_patches": 7},
    "granite_speech5_ctc": {"input_features": (BOTH, 20, 320)},
    "granite_speech5_encoder": {"input_features": (BOTH, 20, 320)},
    "sam3_tracker": {"pixel_values": (BOTH, 3, 64, 64)},
    "idefics": {
        "pixel_values": (BOTH, 1, 3, 32, 32),
        "input_ids": WORDS,
        "image_attention_mask": [[[1]] * 14] * BOTH,
        "attention_mask": ONES,
    },
    "idefics2_perceiver": {"context": (BOTH, 14, 64), "attention_mask": ONES},
    "inkling_audio": {"audio_input_ids": [[1] * 80] * BOTH},
    "instructblip": {"pixel_values": IMAGE, "qformer_input_ids": WORDS, "input_ids": pictures(5, 4)},
    "instructblipvideo": {
        "pixel_values": (BOTH, 4, 3, 32, 32),
        "qformer_input_ids": WORDS,
        "input_ids": pictures(5, 16),
    },
    "informer": {
        "past_values": (BOTH, 14),
        "past_time_features": (BOTH, 14, 1),
        "past_observed_mask": ONES,
        "future_values": (BOTH, 7),
        "future_time_features": (BOTH, 7, 1),
    },
    "kimi_k25_vision": {"pixel_values": (32, 3, 8, 8), "grid_thw": GRID},
    "kosmos-2": {
        "pixel_values": IMAGE,
        "input_ids": WORDS,
        "image_embeds_position_mask": [[True] * 4 + [False] * 10] * BOTH,
    },
    "kosmos_2_5_vision_model": {"hidden_states": (BOTH, 14, 64), "attention_mask": ONES},
    "lightglue": {"pixel_values": (1, BOTH, 3, 64, 64)},
    "lxmert": {"input_ids": WORDS, "visual_feats": (BOTH, 10, 64), "visual_pos": (BOTH, 10, 4)},
    "minicpm_ocr_vision": {"pixel_values": (1, 3, 8, 256), "target_sizes": [[4, 4], [4, 4]]},
    "minicpmv4_6_vision": {"pixel_values": (1, 3, 8, 256), "target_sizes": [[4, 4], [4, 4]]},
    "minicpmv4_7_vision": {"pixel_values": (1, 3, 8, 256), "target_sizes": [[4, 4], [4, 4]]},
    "mllama_vision_model": {
        "pixel_values": (BOTH, 1, 4, 3, 32, 32),
        "aspect_ratio_ids": [[1]] * BOTH,
        "aspect_ratio_mask": [[[1, 1, 0, 0]]] * BOTH,
    },
    "molmo2_adapter": {"image_features": (BOTH, 16, 128), "pooled_patches_idx": [[0, 1], [2, 3]]},
    "molmo2_vision": {"pixel_values": (BOTH, 729, 192)},
    "moshi_depth": {"input_ids": [row[:8] for row in WORDS], "last_hidden_state": (BOTH, 1, 64)},
    "muse_glimmer_assistant": {
        "noise_embeds": (BOTH, 14, 64),
        "context_hidden_states": (BOTH, 14, 128),
        "attention_mask": [[1] * 28] * BOTH,
    },
    "muse_glimmer_vision": {"pixel_values": (32, 384), "grid_thw": GRID},
    "muse_spark_audio": {"input_values": (BOTH, 1920)},
    "muse_spark_vision": {"pixel_values": (32, 384), "grid_thw": GRID},
    "neucodec": {"input_values": (BOTH, 1, 6400), "input_features": (BOTH, 20, 64)},
    "oneformer": {"pixel_values": IMAGE, "task_inputs": [[1] * 77] * BOTH},
    "paddleocr_vl_vision": {"pixel_values": (1, 32, 3, 8, 8), "grid_thw": GRID},
    "phi4_multimodal_audio": {"hidden_states": (BOTH, 80, 80), "mask": None},
    "pi0": {
        "input_ids": pictures(5, 16),
        "pixel_values": (BOTH, 1, 3, 32, 32),
        "state": (BOTH, 32),
        "noise": (BOTH, 50, 32),
        "timestep": (BOTH,),
        "pixel_attention_mask": [[True]] * BOTH,
        "attention_mask": [[1] * 30] * BOTH,
    },
    "pix2struct": {"flattened_patches": PATCHES, "decoder_input_ids": WORDS},
    "pix2struct_vision_model": {"flattened_patches": PATCHES},
    "qwen2_5_omni_audio_encoder": {"input_features": (128, 100), "feature_lens": [60, 40], "aftercnn_lens": [30, 20]},
    "qwen2_5_omni_dit": {
        "hidden_states": (BOTH, 14, 80),
        "condition_vector": (BOTH, 14, 80),
        "speaker_embedding": (BOTH, 14, 64),
        "quantized_code": [row[:7] for row in WORDS],
        "time_step": (BOTH,),
    },
    "qwen2_5_omni_token2wav": {
        "code": [row[:7] for row in WORDS[:1]],
        "conditioning": (1, 64),
        "reference_mel": (1, 14, 80),
        "num_steps": 2,
    },
    "qwen3_asr_encoder": {"input_features": (BOTH, 128, 200), "input_features_mask": [[1] * 200] * BOTH},
    "qwen3_omni_moe_audio_encoder": {"input_features": (128, 200), "feature_lens": [120, 80]},
    "rag": {
        "input_ids": WORDS,
        "context_input_ids": WORDS,
        "context_attention_mask": ONES,
        "doc_scores": (BOTH, 1),
        "decoder_input_ids": WORDS,
        "n_docs": 1,
    },
    "sam2": {"pixel_values": (BOTH, 3, 128, 128)},
    "sam2_video": {"pixel_values": (BOTH, 3, 128, 128)},
    "edgetam": {"pixel_values": (BOTH, 3, 128, 128)},
    "edgetam_video": {"pixel_values": (BOTH, 3, 128, 128)},
    "sam2_hiera_det_model": {"pixel_values": (BOTH, 3, 64, 64)},
    "sam2_vision_model": {"pixel_values": (BOTH, 3, 64, 64)},
    "fastspeech2_conformer_hifigan": {"spectrogram": (BOTH, 14, 80)},
    "speecht5_hifigan": {"spectrogram": (BOTH, 14, 80)},
    "qwen2_5_omni_bigvgan": {"mel_spectrogram": (BOTH, 80, 14)},
    "seggpt": {
        "pixel_values": IMAGE,
        "prompt_pixel_values": IMAGE,
        "prompt_masks": IMAGE,
    },
    "sew": {"input_values": (BOTH, 8000)},
    "sew-d": {"input_values": (BOTH, 8000)},
    "siglip2": {
        "pixel_values": (BOTH, 16, 192),
        "pixel_attention_mask": [[1] * 16] * BOTH,
        "spatial_shapes": [[4, 4]] * BOTH,
        "input_ids": WORDS,
    },
    "siglip2_vision_model": {
        "pixel_values": (BOTH, 16, 192),
        "pixel_attention_mask": [[1] * 16] * BOTH,
        "spatial_shapes": [[4, 4]] * BOTH,
    },
    "superglue": {"pixel_values": (1, BOTH, 3, 64, 64)},
    "t5gemma2_decoder": {"input_ids": WORDS, "encoder_hidden_states": (BOTH, 14, 64)},
    "time_series_transformer": {
        "past_values": (BOTH, 14),
        "past_time_features": (BOTH, 14, 1),
        "past_observed_mask": ONES,
        "future_values": (BOTH, 7),
        "future_time_features": (BOTH, 7, 1),
    },
    "tvp": {"input_ids": WORDS[:1], "pixel_values": (1, 1, 3, 128, 128)},
    "video_llama_3_vision": {"pixel_values": (32, 192), "grid_thw": GRID, "merge_sizes": [1, 1]},
    "videoprism": {"pixel_values_videos": (BOTH, 4, 3, 32, 32), "input_ids": WORDS},
    "voxtral_realtime": {"input_ids": WORDS, "input_features": (BOTH, 128, 112)},
    "voxtral_realtime_text": {"input_ids": WORDS, "t_cond": (1, 1, 64)},
    "xcodec": {"input_values": (BOTH, 1, 16000)},
    "xcodec2": {"input_values": (BOTH, 1, 6400), "input_features": (BOTH, 20, 64)},
    "xclip": {"pixel_values": (BOTH, 8, 3, 32, 32), "input_ids": WORDS},
    "xclip_vision_model": {"pixel_values": (8 * BOTH, 3, 32, 32)},
}
