"""`myvllm.layers` of MinivLLM."""
