"""`vllm.attention.ops`."""
