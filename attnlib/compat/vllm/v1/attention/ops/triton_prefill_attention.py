"""`vllm.v1.attention.ops.triton_prefill_attention`: names of `attnlib.ops.context_attention`."""

from attnlib.ops.context_attention import context_attention_fwd, get_block_size

__all__ = ["context_attention_fwd", "get_block_size"]
