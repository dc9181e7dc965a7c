"""`vllm.attention.utils`; attnlib needs none of its helpers."""
