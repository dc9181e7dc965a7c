"""The cache layout with x-packed keys: `key_cache [B, Hkv, D / x, N, x]`, x elements making 16 bytes, and
`value_cache [B, Hkv, D, N]`; and the ways between it and the common form, `[B, N, Hkv, D]` for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.torch.quant import head_factor, is_quantised

__all__ = ["block_bytes", "common_form", "typed_cache", "with_context"]

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def common_form(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    kv_cache_dtype: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The pages that hold the first `lengths[r]` positions, as keys and values `[n, N, Hkv, D]` and their own table."""
    key_cache, value_cache = (
        typed_cache(key_cache, kv_cache_dtype),
        typed_cache(value_cache, kv_cache_dtype),
    )
    block_size = value_cache.shape[3]
    counts = [-(-length // block_size) for length in lengths.tolist()]
    used = [block_tables[request, :count] for request, count in enumerate(counts)]
    blocks = torch.cat(used) if used else block_tables.new_empty(0)
    key, value = (
        block_bytes(cache).index_select(0, blocks).view(cache.dtype)
        for cache in (key_cache, value_cache)
    )
    table = torch.zeros(
        len(counts), max(counts, default=0), dtype=torch.int32, device=block_tables.device
    )
    first = 0
    for request, count in enumerate(counts):
        table[request, :count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    return (
        key.permute(0, 3, 1, 2, 4).flatten(3).contiguous(),
        value.permute(0, 3, 1, 2).contiguous(),
        table,
    )


def with_context(
    cache: Tensor, table_row: Tensor, context: int, scale: float | Tensor, new: Tensor
) -> Tensor:
    """`[context + query_len, Hkv, D]`: dequantised positions of the cache, then the new rows."""
    old = cache[table_row.long()].flatten(0, 1)[:context]
    if is_quantised(cache.dtype):
        factor = head_factor(scale)
        old = old.float() * (factor.view(-1, 1) if isinstance(factor, Tensor) else factor)
    return torch.cat([old, new.to(old.dtype)])


def typed_cache(cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """A cache of bytes as the fp8 format that `kv_cache_dtype` names; any other cache as it is."""
    if cache.dtype != torch.uint8:
        return cache
    if kv_cache_dtype not in _FP8:
        raise ContractError(
            f"kv_cache_dtype {kv_cache_dtype!r} does not say what the uint8 cache holds: pass one of {', '.join(_FP8)}"
        )
    return cache.view(_FP8[kv_cache_dtype])


def block_bytes(cache: Tensor) -> Tensor:
    """One-byte floats as integers, which every device can select and copy."""
    return cache.view(torch.uint8) if is_quantised(cache.dtype) else cache
