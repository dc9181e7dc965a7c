"""vLLM's PagedAttention in plain torch, written from the third seed document.

The kernels behind the document's methods are not in it. Their results are written out here: dense
attention over the sequence that the block table names, with the masks that the arguments say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PagedAttention", "PagedAttentionMetadata"]

_PARTITION_SIZE = 512
FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass
class PagedAttentionMetadata:
    seq_lens_tensor: Tensor | None
    max_decode_seq_len: int
    block_tables: Tensor | None


class PagedAttention:
    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return [32, 64, 80, 96, 112, 120, 128, 192, 256]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size * num_kv_heads * head_size)

    @staticmethod
    def split_kv_cache(
        kv_cache: Tensor, num_kv_heads: int, head_size: int
    ) -> tuple[Tensor, Tensor]:
        packed = 16 // kv_cache.element_size()
        blocks = kv_cache.shape[1]
        keys = kv_cache[0].view(blocks, num_kv_heads, head_size // packed, -1, packed)
        return keys, kv_cache[1].view(blocks, num_kv_heads, head_size, -1)

    @staticmethod
    def write_to_paged_cache(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        v_scale: Tensor,
    ) -> None:
        size, packed = value_cache.shape[-1], key_cache.shape[-1]
        for token, slot in enumerate(slot_mapping.flatten().tolist()):
            if slot < 0:
                continue
            stored_key = _encoded(key[token], key_cache, kv_cache_dtype, k_scale)
            key_cache[slot // size, :, :, slot % size] = stored_key.unflatten(1, (-1, packed))
            stored_value = _encoded(value[token], value_cache, kv_cache_dtype, v_scale)
            value_cache[slot // size, :, :, slot % size] = stored_value

    @staticmethod
    def forward_decode(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        kv_cache_dtype: str,
        num_kv_heads: int,
        scale: float,
        alibi_slopes: Tensor | None,
        k_scale: Tensor,
        v_scale: Tensor,
        tp_rank: int = 0,
        blocksparse_local_blocks: int = 0,
        blocksparse_vert_stride: int = 0,
        blocksparse_block_size: int = 64,
        blocksparse_head_sliding_step: int = 0,
    ) -> Tensor:
        block_size, heads = value_cache.shape[-1], query.shape[1]
        sparse = blocksparse_vert_stride is not None and blocksparse_vert_stride > 1
        if sparse:
            assert blocksparse_block_size > 0 and blocksparse_block_size % block_size == 0
        partitions = -(-max_seq_len // _PARTITION_SIZE)
        in_one_pass = max_seq_len <= 8192 and (partitions == 1 or len(query) * heads > 512)
        if not in_one_pass:
            assert _PARTITION_SIZE % block_size == 0
        out = torch.empty_like(query)
        for sequence, length in enumerate(seq_lens.tolist()):
            keys, values = _cached(
                key_cache, value_cache, block_tables[sequence], length, kv_cache_dtype,
                (k_scale, v_scale),
            )  # fmt: skip
            for head in range(heads):
                shared = head // (heads // num_kv_heads)
                scores = keys[:, shared] @ query[sequence, head].float() * scale
                if alibi_slopes is not None:
                    scores = scores + alibi_slopes[head] * (torch.arange(length) - length + 1)
                if sparse:
                    counted = tp_rank * heads + head
                    if blocksparse_head_sliding_step < 0:
                        counted = tp_rank * num_kv_heads + shared
                    block = torch.arange(length) // blocksparse_block_size
                    shift = abs(blocksparse_head_sliding_step) * counted + 1
                    on_stripe = (block + shift) % blocksparse_vert_stride == 0
                    own = (length - 1) // blocksparse_block_size
                    is_local = block > own - blocksparse_local_blocks
                    scores = scores.masked_fill(~(on_stripe | is_local), -torch.inf)
                out[sequence, head] = scores.softmax(0) @ values[:, shared]
        return out

    @staticmethod
    def forward_prefix(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache_dtype: str,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens_tensor: Tensor,
        max_query_len: int,
        alibi_slopes: Tensor | None,
        sliding_window: int | None,
        k_scale: Tensor,
        v_scale: Tensor,
    ) -> Tensor:
        out, scale = torch.empty_like(query), query.shape[-1] ** -0.5
        bounds = query_start_loc.tolist()
        for sequence, length in enumerate(seq_lens_tensor.tolist()):
            new = slice(bounds[sequence], bounds[sequence + 1])
            context = length - (new.stop - new.start)
            keys, values = _cached(
                key_cache, value_cache, block_tables[sequence], context, kv_cache_dtype,
                (k_scale, v_scale),
            )  # fmt: skip
            keys, values = torch.cat([keys, key[new]]), torch.cat([values, value[new]])
            for row in range(new.start, new.stop):
                distance = context + row - new.start - torch.arange(length)
                hidden = distance < 0
                if sliding_window is not None and sliding_window > 0:
                    hidden = hidden | (distance >= sliding_window)
                for head in range(query.shape[1]):
                    shared = head // (query.shape[1] // key.shape[1])
                    scores = keys[:, shared] @ query[row, head] * scale
                    if alibi_slopes is not None:
                        scores = scores - alibi_slopes[head] * distance
                    weights = scores.masked_fill(hidden, -torch.inf).softmax(0)
                    out[row, head] = weights @ values[:, shared]
        return out

    @staticmethod
    def swap_blocks(
        src_kv_cache: Sequence[Tensor], dst_kv_cache: Sequence[Tensor], src_to_dst: Tensor
    ) -> None:
        for side in (0, 1):
            for source, target in src_to_dst.tolist():
                dst_kv_cache[side][target] = src_kv_cache[side][source]

    @staticmethod
    def copy_blocks(kv_caches: Sequence[Sequence[Tensor]], src_to_dists: Tensor) -> None:
        for cache in kv_caches:
            PagedAttention.swap_blocks(cache, cache, src_to_dists)


def _encoded(rows: Tensor, cache: Tensor, kv_cache_dtype: str, scale: Tensor | float) -> Tensor:
    """Rows `[H, D]` as the cache stores them; a uint8 cache holds rows / scale in float8."""
    if cache.dtype != torch.uint8:
        return rows.to(cache.dtype)
    return (rows.float() / _per_head(scale)).to(FORMATS[kv_cache_dtype]).view(torch.uint8)


def _cached(
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    length: int,
    kv_cache_dtype: str,
    scales: tuple[Tensor | float, Tensor | float],
) -> tuple[Tensor, Tensor]:
    """The first keys and values `[length, H, D]` of a sequence."""
    size = value_cache.shape[-1]
    found = []
    for cache, scale in zip((key_cache, value_cache), scales, strict=True):
        rows = cache.new_empty((length, cache.shape[1], value_cache.shape[2]))
        for position in range(length):
            block = int(table[position // size])
            rows[position] = cache[block, :, :, position % size].reshape(rows.shape[1:])
        if cache.dtype == torch.uint8:
            rows = rows.view(FORMATS[kv_cache_dtype]).float() * _per_head(scale)
        found.append(rows.float())
    return found[0], found[1]


def _per_head(scale: Tensor | float) -> Tensor:
    return torch.as_tensor(scale, dtype=torch.float32).reshape(-1, 1)
