"""The cache layout of vLLM's PagedAttention, with packed keys.

Keys are `[B, Hkv, D / x, N, x]`, where x elements are 16 bytes, and values `[B, Hkv, D, N]`. The
layout of the P-rules is `[B, N, Hkv, D]` for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError

__all__ = ["FP8_DTYPES", "check_packed_cache", "typed_cache"]

FP8_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""What a uint8 cache holds, by vLLM's `kv_cache_dtype`."""


def typed_cache(cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """A uint8 cache viewed as the float8 dtype `kv_cache_dtype` names; other caches unchanged.

    Raises:
        ContractError: a uint8 cache with an unknown `kv_cache_dtype`.
    """
    if cache.dtype != torch.uint8:
        return cache
    if kv_cache_dtype not in FP8_DTYPES:
        raise ContractError(
            f"kv_cache_dtype {kv_cache_dtype!r} is not a float8 format, but the cache is uint8: "
            f"pass one of {', '.join(FP8_DTYPES)}"
        )
    return cache.view(FP8_DTYPES[kv_cache_dtype])


def check_packed_cache(
    rows: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> None:
    """Check that kernels can address a packed cache and the lengths of a batch.

    Args:
        rows: `[T, heads, D]`, the queries or new keys; the heads are a multiple of Hkv.
        key_cache: `[B, Hkv, D / x, N, x]`; the last three dimensions dense, N a power of two.
        value_cache: `[B, Hkv, D, N]`; the last two dimensions dense.
        block_table: `[R, M]`, last stride 1.
        seq_lens: `[R]`, contiguous.
        query_start_loc: `[R + 1]`, contiguous.

    Raises:
        ContractError: names the tensor, what it has, and what is required.
    """
    if key_cache.dim() != 5 or value_cache.dim() != 4:
        raise ContractError(
            f"the caches have shapes {tuple(key_cache.shape)} and {tuple(value_cache.shape)}; they "
            "must be [B, Hkv, D / x, N, x] and [B, Hkv, D, N]: use PagedAttention.split_kv_cache"
        )
    _, num_kv_heads, groups, block_size, x = key_cache.shape
    if value_cache.shape[1:] != (num_kv_heads, groups * x, block_size):
        raise ContractError(
            f"value_cache has shape {tuple(value_cache.shape)}; with keys "
            f"{tuple(key_cache.shape)} it must be [B, {num_kv_heads}, {groups * x}, {block_size}]"
        )
    if rows.dim() != 3 or rows.shape[2] != groups * x or rows.shape[1] % num_kv_heads:
        raise ContractError(
            f"the tokens have shape {tuple(rows.shape)}; over {num_kv_heads} KV heads of size "
            f"{groups * x} they must be [T, a multiple of {num_kv_heads}, {groups * x}]"
        )
    dense = key_cache.stride()[2:] == (block_size * x, x, 1)
    if not dense or value_cache.stride()[2:] != (block_size, 1) or rows.stride(2) != 1:
        raise ContractError(
            f"strides {key_cache.stride()} of key_cache, {value_cache.stride()} of value_cache and "
            f"{rows.stride()} of the tokens: the last dimensions must be dense"
        )
    if block_size & (block_size - 1):
        raise ContractError(f"block_size {block_size} is not a power of two: allocate 16 or 32")
    if block_table is not None and block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise ContractError(
            f"block_table has last stride {block_table.stride(1)}; it must be 1: call "
            ".contiguous()",
            rule="P3",
        )
    for name, lengths in (("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        if lengths is not None and not lengths.is_contiguous():
            raise ContractError(f"{name} is strided; call .contiguous()", rule="M1")
