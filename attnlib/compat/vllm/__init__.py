"""Modules of vLLM, served by attnlib."""
