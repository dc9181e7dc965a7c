"""Modules of vLLM, served by attnlib.

| vLLM | attnlib |
|---|---|
| `vllm.attention` | `attnlib.compat.vllm` |
| `vllm.forward_context` | `attnlib.compat.vllm.forward_context` |
| `vllm.attention.ops.paged_attn` | `attnlib.ops.paged_attention` |
| `vllm.v1.attention.backends.utils` | `attnlib.compat.vllm.backend_utils` |
| `vllm.v1.attention.ops.triton_prefill_attention` | `attnlib.ops.context_attention` |
"""

from attnlib.backends.base import AttentionBackend
from attnlib.compat.vllm.attention import Attention
from attnlib.compat.vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    set_forward_context,
)
from attnlib.compat.vllm.runner import AttentionMetadataBuilder, AttentionState
from attnlib.compat.vllm.selector import get_attn_backend
from attnlib.metadata.base import AttentionMetadata
from attnlib.spec import AttentionType

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionState",
    "AttentionType",
    "ForwardContext",
    "get_attn_backend",
    "get_forward_context",
    "set_forward_context",
]
