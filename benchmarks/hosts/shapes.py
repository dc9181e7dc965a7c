"""Configurations of models with random weights for `vllm_throughput.py`."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = dict(
    vocab_size=32000, max_position_embeddings=131072, rms_norm_eps=1e-5, torch_dtype="bfloat16",
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "llama": dict(
        _COMMON, architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096,
        intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, rope_theta=500000.0, hidden_act="silu",
    ),
    "gemma3": dict(
        _COMMON, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", hidden_size=2560,
        intermediate_size=10240, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256, sliding_window=1024,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "deepseek": dict(
        _COMMON, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3",
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=16, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=8, n_routed_experts=8,
        n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=64,
        hidden_act="silu",
    ),
}  # fmt: skip
"""Name -> fields of config.json: Llama 3 8B; layers of Gemma 3 4B; latent layers with 16 heads and
without experts, whose kernels are vLLM's."""
