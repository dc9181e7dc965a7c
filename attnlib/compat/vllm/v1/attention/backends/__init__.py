"""`vllm.v1.attention.backends`."""
