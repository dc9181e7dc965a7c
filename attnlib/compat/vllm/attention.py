"""`vllm.attention` under its own path; `attnlib.compat.vllm` has the same names."""

from attnlib.compat.vllm.backends.abstract import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionState,
    AttentionType,
)
from attnlib.compat.vllm.layer import Attention
from attnlib.compat.vllm.selector import get_attn_backend

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionState",
    "AttentionType",
    "get_attn_backend",
]
