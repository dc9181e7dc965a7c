"""`vllm.attention.ops.paged_attn`: the names of `attnlib.ops.paged_attention`."""

from attnlib.ops.paged_attention import (
    _PARTITION_SIZE as _PARTITION_SIZE,
)
from attnlib.ops.paged_attention import (
    PagedAttention,
    PagedAttentionMetadata,
)

__all__ = ["PagedAttention", "PagedAttentionMetadata"]
