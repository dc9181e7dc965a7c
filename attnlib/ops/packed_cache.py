"""The cache layout with packed keys, and its conversion to the layout of the P-rules.

Keys are `[B, Hkv, D / x, N, x]`, where x elements are 16 bytes, and values `[B, Hkv, D, N]`. The
layout of the P-rules is `[B, N, Hkv, D]` for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.torch.quant import head_factor, is_quantized

__all__ = ["block_bytes", "common_form", "typed_cache", "with_context"]

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def common_form(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    kv_cache_dtype: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of the blocks in use, in the layout of the P-rules.

    Args:
        key_cache: `[B, Hkv, D / x, N, x]`.
        value_cache: `[B, Hkv, D, N]`.
        block_tables: `[R, M]`, block ids.
        lengths: `[R]` on the CPU, positions in use per request.
        kv_cache_dtype: what uint8 caches hold; see `typed_cache`.

    Returns:
        Keys and values `[n, N, Hkv, D]`, and an int32 block table `[R, max blocks]` into them.
    """
    key_cache = typed_cache(key_cache, kv_cache_dtype)
    value_cache = typed_cache(value_cache, kv_cache_dtype)
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
    """Keys or values of one request: the dequantized context, then the new rows.

    Args:
        cache: `[n, N, Hkv, D]`, as `common_form` returns it.
        table_row: `[M]`, the request's blocks in `cache`.
        context: number of cached positions.
        scale: scale of a float8 cache; ignored for other dtypes.
        new: `[query_len, Hkv, D]`.

    Returns:
        `[context + query_len, Hkv, D]`.
    """
    old = cache[table_row.long()].flatten(0, 1)[:context]
    if is_quantized(cache.dtype):
        factor = head_factor(scale)
        old = old.float() * (factor.view(-1, 1) if isinstance(factor, Tensor) else factor)
    return torch.cat([old, new.to(old.dtype)])


def typed_cache(cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """A uint8 cache viewed as the float8 dtype `kv_cache_dtype` names; other caches unchanged.

    Raises:
        ContractError: a uint8 cache with an unknown `kv_cache_dtype`.
    """
    if cache.dtype != torch.uint8:
        return cache
    if kv_cache_dtype not in _FP8:
        raise ContractError(
            f"kv_cache_dtype {kv_cache_dtype!r} is not a float8 format, but the cache is uint8: "
            f"pass one of {', '.join(_FP8)}"
        )
    return cache.view(_FP8[kv_cache_dtype])


def block_bytes(cache: Tensor) -> Tensor:
    """float8 as uint8, because indexing float8 is not implemented on every device."""
    return cache.view(torch.uint8) if is_quantized(cache.dtype) else cache
