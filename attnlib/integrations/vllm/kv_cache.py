"""vLLM's memory of one layer as a `PagedKVCache`, without a copy."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.kv_dtype import format_pair
from attnlib.spec import AttentionSpec

__all__ = ["cache_shape", "cache_view", "stride_order"]


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, ...]:
    """`[B, Hkv, N, 2 * D]`: keys, then values, in the last dimension."""
    return (num_blocks, num_kv_heads, block_size, 2 * head_size)


def stride_order(include_num_layers_dimension: bool) -> tuple[int, ...]:
    """Order in memory for VLLM_KV_CACHE_LAYOUT, outermost first; with blocks before layers."""
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    if get_kv_cache_layout() == "HND":
        return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
    return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)


def cache_view(layer: Any, kv_cache: torch.Tensor, spec: AttentionSpec) -> PagedKVCache:
    """The cache of a layer.

    Args:
        layer: vLLM's layer. Its `_k_scale` and `_v_scale` are read at each step, because vLLM may
            load or compute their values later.
        kv_cache: `[B, Hkv, N, 2 * D]`, any strides; 8-bit floats may be stored as uint8. For
            formats with scales in the page `[B, Hkv, N, bytes]`, consecutive within a block.
        spec: of the layer.

    Raises:
        ContractError: memory of another shape.
    """
    if spec.scales_in_page:
        return _page_view(kv_cache, spec)
    scales = {}
    if spec.is_kv_quantized:
        scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
    dtype = spec.kv_dtype if kv_cache.dtype.itemsize == 1 else None
    return PagedKVCache.from_vllm(kv_cache, head_size=spec.head_size, dtype=dtype, **scales)


def _page_view(kv_cache: torch.Tensor, spec: AttentionSpec) -> PagedKVCache:
    """The cache of a format with scales in the page."""
    blocks, heads, tokens, content = kv_cache.shape
    data = kv_cache.view(torch.uint8)
    if data.stride()[1:] != (tokens * content, content, 1):
        stored = format_pair(spec.kv_format, spec.value_format) or spec.kv_format.name
        raise ContractError(
            f"the KV cache has strides {data.stride()} for shape {tuple(data.shape)}: the bytes of "
            f"a block of {stored} must be consecutive; unset VLLM_KV_CACHE_LAYOUT",
            rule="P13",
        )
    pages = data.as_strided((blocks, heads * tokens * content), (data.stride(0), 1))
    return PagedKVCache.from_pages(pages, spec.replace(block_size=tokens))
