"""Modules of vLLM, served by attnlib.

| vLLM | attnlib |
|---|---|
| `vllm.attention` and its submodules | `attnlib.compat.vllm`, with the same submodules |
| `vllm.forward_context` | `attnlib.compat.vllm.forward_context` |
| `vllm.v1.attention.backends.utils` | `attnlib.compat.vllm.v1.attention.backends.utils` |
| `vllm.v1.attention.ops.triton_prefill_attention` | the same below `attnlib.compat.vllm` |

`adapt_backend` makes a backend of attnlib from one in vLLM's style.
"""

from attnlib.compat.vllm.adapter import adapt_backend
from attnlib.compat.vllm.backends.abstract import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionState,
    AttentionType,
)
from attnlib.compat.vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    set_forward_context,
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
    "ForwardContext",
    "adapt_backend",
    "get_attn_backend",
    "get_forward_context",
    "set_forward_context",
]
