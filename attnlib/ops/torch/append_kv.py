"""Append new keys and values to the cached ones of each request, as FlashAttention's
`flash_attn_with_kvcache` does. The lengths stay on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.torch.cache_write import write_kv

__all__ = ["append_kv"]


@torch.no_grad()
def append_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    seq_lens: Tensor,
) -> None:
    """Write `key[r, i]` and `value[r, i]` to position `cache_seqlens[r] + i` of request r.

    Args:
        key: `[R, T, Hkv, D]`, any strides, T new tokens of each request.
        value: `[R, T, Hkv, Dv]`, likewise.
        key_cache: `[B, N, Hkv, D]`, any strides, not quantized.
        value_cache: `[B, N, Hkv, Dv]`, likewise.
        block_table: `[R, M]` int32 (P3). Positions at or past `M * N` are not written.
        cache_seqlens: `[R]` int32, cached tokens of each request, without the new ones.
        seq_lens: `[R]` int32, written: `cache_seqlens + T`. Must not be `cache_seqlens`.
    """
    new_tokens, block_size = key.shape[1], key_cache.shape[1]
    torch.add(cache_seqlens, new_tokens, out=seq_lens)
    offsets = torch.arange(new_tokens, device=cache_seqlens.device)
    positions = cache_seqlens.long()[:, None] + offsets
    last = block_table.shape[1] - 1
    columns = positions.div(block_size, rounding_mode="floor")
    blocks = block_table.gather(1, columns.clamp(0, max(last, 0))).long()
    slots = blocks * block_size + positions.remainder(block_size)
    slots = torch.where((columns >= 0) & (columns <= last), slots, -1)
    write_kv(key.flatten(0, 1), value.flatten(0, 1), key_cache, value_cache, slots.flatten())
