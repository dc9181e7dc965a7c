"""The older paged-attention interface: one class of static methods over a cache with x-packed keys.

It exists so that code written against that interface can move over and keep its cache. The layout is not the
one of the P-rules (see `packed_cache`), so a call brings the pages it needs to the common form and computes in plain
torch. Where the original chose between one pass and partitions of 512 keys, the result is the same by contract: there
is one way here. `block_sparse` says precisely what block-sparse decode sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.block_sparse import BlockSparsePattern, block_sparse_decode
from attnlib.ops.packed_cache import block_bytes, common_form, typed_cache, with_context
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.cache_write import write_kv
from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.torch.quant import head_factor, is_quantised
from attnlib.ops.torch.request import KeySpan, QueryRows, attend_rows

__all__ = ["PagedAttention", "PagedAttentionMetadata"]


@dataclass
class PagedAttentionMetadata:
    """What paged attention needs to know of a batch.

    Attributes:
        seq_lens_tensor: `[R]`, all tokens of each sequence so far, or None.
        max_decode_seq_len: longest sequence among the decodes; 0 when there is none.
        block_tables: `[R, max blocks]`, physical block of each page, or None.
    """

    seq_lens_tensor: Tensor | None
    max_decode_seq_len: int
    block_tables: Tensor | None


class PagedAttention:
    """Cache shapes, writes and attention of the older interface; nothing is kept between calls."""

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """The head sizes that the original was compiled for; plain torch has no such limit."""
        return [32, 64, 80, 96, 112, 120, 128, 192, 256]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """`(2, B, N * Hkv * D)`: keys, then values."""
        return (2, num_blocks, block_size * num_kv_heads * head_size)

    @staticmethod
    def split_kv_cache(
        kv_cache: Tensor, num_kv_heads: int, head_size: int
    ) -> tuple[Tensor, Tensor]:
        """Views of `kv_cache [2, B, N * Hkv * D]`: keys `[B, Hkv, D / x, N, x]` and values `[B, Hkv, D, N]`.

        Raises:
            ContractError: the head size is not a multiple of x = 16 bytes / element size.
        """
        x = 16 // kv_cache.element_size()
        if head_size % x:
            raise ContractError(
                f"head_size {head_size} is not a multiple of x = {x} ({kv_cache.dtype} keys are packed by 16 bytes): "
                "choose another cache dtype, or the common layout of PagedKVCache"
            )
        num_blocks = kv_cache.shape[1]
        key_cache = kv_cache[0].view(num_blocks, num_kv_heads, head_size // x, -1, x)
        return key_cache, kv_cache[1].view(num_blocks, num_kv_heads, head_size, -1)

    @staticmethod
    def write_to_paged_cache(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: float | Tensor,
        v_scale: float | Tensor,
    ) -> None:
        """Write `key [T, Hkv, D]` and `value [T, Hkv, D]` to their slots; -1 writes nothing (P4)."""
        key_cache, value_cache = (
            typed_cache(key_cache, kv_cache_dtype),
            typed_cache(value_cache, kv_cache_dtype),
        )
        num_heads, parts, x = key_cache.shape[1], key_cache.shape[2], key_cache.shape[4]
        # Every x-wide part of a head counts as a head of its own, which makes the packed keys an ordinary cache.
        packed = key_cache.permute(0, 3, 1, 2, 4).flatten(2, 3)
        factor = head_factor(k_scale)
        if isinstance(factor, Tensor) and factor.numel() == num_heads:
            factor = factor.repeat_interleave(parts)
        write_kv(
            key.reshape(key.shape[0], num_heads * parts, x), value, packed, value_cache.permute(0, 3, 1, 2),
            slot_mapping.flatten(), k_scale=factor, v_scale=v_scale,
        )  # fmt: skip

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
        k_scale: float | Tensor,
        v_scale: float | Tensor,
        tp_rank: int = 0,
        blocksparse_local_blocks: int = 0,
        blocksparse_vert_stride: int = 0,
        blocksparse_block_size: int = 64,
        blocksparse_head_sliding_step: int = 0,
    ) -> Tensor:
        """Attention of one query token per sequence, `[R, Hq, D]`; block-sparse with a `blocksparse_vert_stride` > 1.

        Raises:
            ContractError: a sparse block that is not a whole number of cache blocks.
        """
        lengths = seq_lens.cpu()
        key, value, table = common_form(
            key_cache, value_cache, block_tables, lengths, kv_cache_dtype
        )
        scales = [
            head_factor(given) if is_quantised(key.dtype) else 1.0 for given in (k_scale, v_scale)
        ]
        out = torch.empty_like(query)
        if (blocksparse_vert_stride or 0) > 1:
            pattern = BlockSparsePattern(
                blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
                blocksparse_head_sliding_step, query.shape[1], num_kv_heads, tp_rank,
            )  # fmt: skip
            pattern.check(key.shape[1])
            params = AttentionParams(scale=scale, alibi_slopes=alibi_slopes)
            for request, seq_len in enumerate(lengths.tolist()):
                pages = table[request].long()
                keys, values = (cache[pages].flatten(0, 1)[:seq_len] for cache in (key, value))
                own = slice(request, request + 1)
                out[own] = block_sparse_decode(
                    query[own], keys, values, params, pattern, *scales
                ).to(out.dtype)
            return out
        starts = torch.arange(query.shape[0] + 1, dtype=torch.int32)
        params = AttentionParams(
            scale=scale, alibi_slopes=alibi_slopes, k_scale=scales[0], v_scale=scales[1]
        )
        paged_decode(
            query,
            key,
            value,
            table,
            starts,
            lengths,
            params,
            max_query_len=1,
            max_seq_len=max_seq_len,
            out=out,
            query_start_loc_cpu=starts,
            seq_lens_cpu=lengths,
        )
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
        k_scale: float | Tensor,
        v_scale: float | Tensor,
    ) -> Tensor:
        """Causal attention of new tokens over their cached context and each other, `[T, Hq, D]`.

        The context (seq_len - query_len positions) comes from the cache; the new tokens' keys and values are taken from
        `key` and `value`, unrounded. `sliding_window` W shows W keys, the query's own included; None or <= 0 shows all.
        Rows past `query_start_loc[-1]` are 0.
        """
        starts, lengths = query_start_loc.tolist(), seq_lens_tensor.tolist()
        contexts = torch.tensor(
            [n - (starts[r + 1] - starts[r]) for r, n in enumerate(lengths)], dtype=torch.int64
        )
        old_key, old_value, table = common_form(
            key_cache, value_cache, block_tables, contexts, kv_cache_dtype
        )
        window = (
            (sliding_window - 1, -1)
            if sliding_window is not None and sliding_window > 0
            else (-1, -1)
        )
        params = AttentionParams(
            scale=query.shape[-1] ** -0.5, alibi_slopes=alibi_slopes, window=window
        )
        out = torch.zeros_like(query)
        for request, context in enumerate(contexts.tolist()):
            own = slice(starts[request], starts[request + 1])
            keys = with_context(old_key, table[request], context, k_scale, key[own])
            values = with_context(old_value, table[request], context, v_scale, value[own])
            rows = QueryRows(query[own], context, lengths[request], context, True)
            attend_rows(rows, KeySpan(keys, values), params, out[own], None)
        return out

    @staticmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
        """Copy whole blocks from one cache to another, across devices too; `src_to_dst [n, 2]` holds (source, target).

        All sources are read before a target is written.
        """
        sources, targets = src_to_dst.long().unbind(1)
        for source, target in zip(src_kv_cache, dst_kv_cache, strict=True):
            moved = block_bytes(source).index_select(0, sources.to(source.device))
            block_bytes(target).index_copy_(0, targets.to(target.device), moved.to(target.device))

    @staticmethod
    def copy_blocks(kv_caches: list[Tensor], src_to_dists: Tensor) -> None:
        """Copy whole blocks inside each layer's cache; `src_to_dists [n, 2]` holds (source, target)."""
        for kv_cache in kv_caches:
            PagedAttention.swap_blocks(kv_cache, kv_cache, src_to_dists)
