"""Fields that the rules of `sizes` cannot know: values that depend on each other.

The key is a model type; the fields apply to every configuration of the type, also to one inside of
another. A class name as the key applies to this class only. The value of a configuration inside is
a dict of its fields.
"""

from __future__ import annotations

from typing import Any

__all__ = ["OVERRIDES", "START"]

_SLIDING = ["sliding_attention", "full_attention"]
_SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": _SLIDING * 2,
    "num_kv_shared_layers": 2,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}
_RESNET = {
    "model_type": "resnet",
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 32, 64],
    "embedding_size": 8,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_DETR = {"backbone_config": _RESNET}
_ASSISTANT = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_CODEC = {"num_filters": 4, "depths": [1] * 7}

_LETTERS = str.maketrans("0123456789", "ABCDEFGHIJ")

START: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    **{name: _DETR for name in ("conditional_detr", "dab-detr", "deformable_detr", "detr")},
    "table-transformer": _DETR,
    "gemma4_assistant": {"text_config": {**_ASSISTANT, "num_hidden_layers": 4}},
}
"""What a configuration needs to be created with its default values."""

OVERRIDES: dict[str, dict[str, Any]] = {
    # decoders
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_key_value_heads": 2},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [16, 48],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 1,
    },
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
    },
    "cohere_compass_text": {
        "layer_types": _SLIDING,
        "rope_parameters": {kind: {**_ROPE, "mrope_section": [4, 2, 2]} for kind in _SLIDING},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "longcat_flash": {"head_dim": 8},
    "blt": {"num_hidden_layers": 2},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "glm5_next_text": {"index_kpool": 2},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "xmod": {"default_language": "en_XX"},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "xlm": {"emb_dim": 64},
    "flaubert": {"emb_dim": 64},
    "ReformerForMaskedLM": {"is_decoder": False},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {**_SHARED_KV, "hidden_size_per_layer_input": 8, "laurel_rank": 8},
    "gemma4_text": {**_SHARED_KV, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
    "gemma4_unified_text": {**_SHARED_KV, "global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    # encoders
    "esm": {"vocab_size": 128, "mask_token_id": 32, "pad_token_id": 1},
    "mobilebert": {"intra_bottleneck_size": 64, "hidden_size": 128, "embedding_size": 128},
    "squeezebert": {"embedding_size": 64},
    # audio
    "mimi": {"upsample_groups": 64},
    "mimi_decoder": {"upsample_groups": 64},
    "pocket_tts_audio_tokenizer": {"upsample_groups": 64},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 64},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    **{name: {"codebook_dim": 64} for name in ("wavtokenizer", "wavtokenizer_encoder")},
    "vibevoice_acoustic_tokenizer": _CODEC,
    "vibevoice_acoustic_tokenizer_encoder": _CODEC,
    "vibevoice_acoustic_tokenizer_decoder": _CODEC,
    # images
    "ernie4_5_vl_moe_text": {"rope_parameters": {"mrope_section": [2, 2, 4]}},
    "paddleocr_vl_text": {"rope_parameters": {"mrope_section": [4, 2, 2]}},
    "pp_formulanet_vision": {"decoder_hidden_size": 64},
    "hy_v4_vl_text": {"rope_parameters": {"mrope_section": [2, 1, 1]}},
    "mistral4": {"rope_parameters": {"partial_rotary_factor": 1 / 3}},
    "blip-2": {"image_token_index": 120},
    "instructblip": {"image_token_index": 120},
    "instructblipvideo": {"video_token_index": 120, "image_token_index": 120},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 98, "vision_end_token_id": 99},
    "chameleon": {
        "vocabulary_map": {
            "<image>": 127,
            **{f"IMGIMG{str(i).translate(_LETTERS)}Z": 30 + i for i in range(16)},
        },
    },
    "chameleon_vqgan": {"num_embeddings": 16, "resolution": 32},
    "emu3": {
        "vocabulary_map": {
            "<image>": 127,
            "<|extra_200|>": 126,
            **{f"<|visual token {i:06}|>": 30 + i for i in range(16)},
        },
    },
    "emu3_vqgan": {"codebook_size": 16, "base_channels": 32},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "1/2",
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "d_fine": {"decoder_layers": 3},
    "efficientloftr": {"hidden_size": 256},
    "timm_backbone": {"backbone": "resnet18"},
    "omdet-turbo": _DETR,
}
