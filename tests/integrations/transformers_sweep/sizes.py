"""The sizes of the tiny models: rules by the name of a configuration field.

A rule applies to every configuration that has the field; `overrides` holds the exceptions.
"""

from __future__ import annotations

__all__ = ["HEAD_DIM", "HIDDEN", "INTEGERS", "LARGEST", "LENGTH", "VOCABULARY", "WINDOW"]

VOCABULARY = 128
WINDOW = 8
LENGTH = 20
"""Tokens of the longest prompt: more than two windows."""

HEAD_DIM = 16
HIDDEN, _HEADS, _KV_HEADS = 64, 4, 2


def _named(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


INTEGERS: dict[str, int] = {
    **_named(
        VOCABULARY,
        "vocab_size src_vocab_size tgt_vocab_size text_vocab_size vocab_size_per_layer_input "
        "entity_vocab_size unpadded_vocab_size vision_vocab_size encoder_hash_byte_group_vocab "
        "text_encoder_vocab_size max_position_embeddings n_positions n_ctx max_seq_len "
        "max_sequence_length max_target_positions max_encoder_position_embeddings "
        "max_decoder_position_embeddings original_max_position_embeddings max_text_positions "
        "max_speech_positions seq_len",
    ),
    **_named(
        HIDDEN,
        "hidden_size d_model n_embd dim_model out_hidden_size text_hidden_size text_embed_dim "
        "word_embed_proj_dim vision_hidden_size projection_size hidden_size_global "
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dim_ff dff n_inner "
        "ffn_hidden_size expert_ffn_hidden_size dense_intermediate_size intermediate_size_mlp "
        "feed_forward_size block_ff_dim decoder_intermediate_size mamba_d_ssm "
        "projector_hidden_size audio_hidden_size condition_dim emb_dim",
    ),
    **_named(
        32,
        "max_source_positions moe_intermediate_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size shared_experts_intermediate_size share_expert_dim "
        "projection_dim entity_emb_size shared_intermediate_size",
    ),
    **_named(
        _HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "swa_num_attention_heads decoder_num_attention_heads encoder_num_attention_heads "
        "linear_num_value_heads linear_num_heads index_n_heads n_routed_experts num_experts "
        "num_local_experts moe_num_experts",
    ),
    **_named(
        _KV_HEADS,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads "
        "num_experts_per_tok moe_topk moe_k moe_top_k num_hidden_layers n_layer n_layers "
        "num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
        "speech_encoder_layers t2u_encoder_layers t2u_decoder_layers decoder_num_hidden_layers "
        "encoder_num_hidden_layers num_spatial_layers num_temporal_layers num_auxiliary_layers "
        "depth layers l_layers x_layers r_layers resampler_depth num_hidden_layers_encoder "
        "perceiver_resampler_num_layers memory_attention_num_layers conf_num_hidden_layers "
        "decoder_num_layers num_attention_layers num_self_attends_per_block "
        "text_encoder_num_layers",
    ),
    **_named(
        HEAD_DIM,
        "head_dim kv_channels global_head_dim swa_head_dim attention_head_size d_kv dim_head "
        "kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim o_lora_rank index_head_dim query_pre_attn_scalar",
    ),
    **_named(
        WINDOW,
        "sliding_window sliding_window_size window_size_left attention_window local_attention "
        "attention_window_size keep_window_size attention_chunk_size local_attention_window_len "
        "mamba_chunk_size chunk_size index_topk local_radius qk_rope_head_dim "
        "encoder_max_relative_position",
    ),
    **_named(4, "mm_tokens_per_image vision_soft_tokens_per_image latent_query_num"),
    **_named(16, "mamba_d_state ssm_state_size state_size mamba_head_dim mamba_d_head"),
    **_named(1, "max_window_layers first_k_dense_replace num_dense_layers topk_group n_group"),
    **_named(2, "attn_layer_period full_attention_interval global_attn_every_n_layers"),
    **_named(2, "sliding_window_pattern _sliding_window_pattern no_rope_layer_interval"),
    **_named(1, "attn_layer_offset n_shared_experts num_shared_experts max_depth"),
}
"""Value of an integer field by its name, applied where the default is larger."""

LARGEST = 120_000_000
"""Parameters of the largest model that the sweep runs."""
