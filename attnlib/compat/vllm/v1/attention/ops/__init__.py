"""`vllm.v1.attention.ops`."""
