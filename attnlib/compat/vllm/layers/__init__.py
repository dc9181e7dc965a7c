"""`vllm.attention.layers`; attnlib has none of its special layers."""
