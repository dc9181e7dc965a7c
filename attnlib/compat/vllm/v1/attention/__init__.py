"""`vllm.v1.attention`."""
