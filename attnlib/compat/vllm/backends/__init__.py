"""`vllm.attention.backends`."""
