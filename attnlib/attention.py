"""The names of vLLM's package `vllm.attention`, as attnlib's own classes.

Those with vLLM's constructors are in `attnlib.compat.vllm`.
"""

from attnlib.backends.base import AttentionBackend
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.state import AttentionState
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionType

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionState",
    "AttentionType",
    "get_attn_backend",
]
