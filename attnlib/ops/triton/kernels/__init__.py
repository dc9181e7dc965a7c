"""Triton device code shared by the attention operations; no host code."""
