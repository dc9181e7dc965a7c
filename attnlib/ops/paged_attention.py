"""vLLM's older `PagedAttention` interface: a class of static methods over a cache with packed keys.

Code that uses that interface can switch to attnlib and keep its cache. The layout is not the one of
the P-rules (see `packed_cache`): each call copies the blocks that it needs to the layout of the
P-rules and computes in plain torch. `block_sparse` describes the pattern of block-sparse decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.block_moves import checked_pairs, move_blocks
from attnlib.ops.block_sparse import BlockSparsePattern, block_sparse_decode
from attnlib.ops.packed_cache import common_form, typed_cache, with_context
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.cache_write import write_kv
from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.torch.quant import head_factor, is_quantized
from attnlib.ops.torch.request import KeySpan, QueryRows, attend_rows

__all__ = ["PagedAttention", "PagedAttentionMetadata"]


@dataclass
class PagedAttentionMetadata:
    """The batch as the interface describes it.

    Attributes:
        seq_lens_tensor: `[R]`, tokens of each sequence so far, or None.
        max_decode_seq_len: length of the longest decode; 0 without decodes.
        block_tables: `[R, max blocks]`, block ids, or None.
    """

    seq_lens_tensor: Tensor | None
    max_decode_seq_len: int
    block_tables: Tensor | None


class PagedAttention:
    """Cache shapes, cache writes and attention of that interface; it keeps no state."""

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """The head sizes that vLLM's kernels support; this implementation has no limit."""
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
        """Keys `[B, Hkv, D / x, N, x]` and values `[B, Hkv, D, N]` as views of the cache.

        Args:
            kv_cache: `[2, B, N * Hkv * D]`.
            num_kv_heads: Hkv.
            head_size: D.

        Raises:
            ContractError: the head size is not a multiple of x = 16 bytes / element size.
        """
        x = 16 // kv_cache.element_size()
        if head_size % x:
            raise ContractError(
                f"head_size {head_size} is not a multiple of x = {x} ({kv_cache.dtype} keys are "
                "packed in units of 16 bytes): choose another cache dtype, or use PagedKVCache"
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
        """Write keys and values to their slots (P4).

        Args:
            key: `[T, Hkv, D]`.
            value: `[T, Hkv, D]`.
            key_cache: `[B, Hkv, D / x, N, x]`.
            value_cache: `[B, Hkv, D, N]`.
            slot_mapping: `[T]` int64 of any shape with T elements; a negative slot writes nothing.
            kv_cache_dtype: what uint8 caches hold: "fp8", "fp8_e4m3" or "fp8_e5m2".
            k_scale: scale of a float8 key cache, a float, a 0-d or `[Hkv]` tensor.
            v_scale: the same for values.
        """
        key_cache = typed_cache(key_cache, kv_cache_dtype)
        value_cache = typed_cache(value_cache, kv_cache_dtype)
        num_heads, groups, x = key_cache.shape[1], key_cache.shape[2], key_cache.shape[4]
        # With each group of x elements as a head, the packed keys have the layout of the P-rules.
        packed = key_cache.permute(0, 3, 1, 2, 4).flatten(2, 3)
        factor = head_factor(k_scale)
        if isinstance(factor, Tensor) and factor.numel() == num_heads:
            factor = factor.repeat_interleave(groups)
        write_kv(
            key.reshape(key.shape[0], num_heads * groups, x),
            value,
            packed,
            value_cache.permute(0, 3, 1, 2),
            slot_mapping.flatten(),
            k_scale=factor,
            v_scale=v_scale,
        )

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
        """Attention of one query token per sequence.

        Args:
            query: `[R, Hq, D]`.
            key_cache: `[B, Hkv, D / x, N, x]`.
            value_cache: `[B, Hkv, D, N]`.
            block_tables: `[R, max blocks]`, block ids.
            seq_lens: `[R]`, keys of each sequence, the query's own included.
            max_seq_len: upper bound of `seq_lens`; ignored.
            kv_cache_dtype: what uint8 caches hold.
            num_kv_heads: Hkv.
            scale: factor of q . k.
            alibi_slopes: `[Hq]` float32, or None.
            k_scale: scale of a float8 key cache.
            v_scale: the same for values.
            tp_rank: tensor-parallel rank, for the block-sparse pattern.
            blocksparse_local_blocks: see `BlockSparsePattern.local_blocks`.
            blocksparse_vert_stride: above 1, attention is block-sparse with this stride.
            blocksparse_block_size: see `BlockSparsePattern.block_size`.
            blocksparse_head_sliding_step: see `BlockSparsePattern.head_sliding_step`.

        Returns:
            `[R, Hq, D]`.

        Raises:
            ContractError: a sparse block that is not a whole number of cache blocks.
        """
        lengths = seq_lens.cpu()
        key, value, table = common_form(
            key_cache, value_cache, block_tables, lengths, kv_cache_dtype
        )
        scales = [
            head_factor(given) if is_quantized(key.dtype) else 1.0 for given in (k_scale, v_scale)
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
                row = slice(request, request + 1)
                out[row] = block_sparse_decode(
                    query[row], keys, values, params, pattern, *scales
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
        """Causal attention of new tokens over their cached context and each other.

        Args:
            query: `[T, Hq, D]`.
            key: `[T, Hkv, D]`, keys of the new tokens; used as given, not as the cache stores them.
            value: `[T, Hkv, D]`, likewise.
            kv_cache_dtype: what uint8 caches hold.
            key_cache: `[B, Hkv, D / x, N, x]`, read for the context of seq_len - query_len keys.
            value_cache: `[B, Hkv, D, N]`, likewise.
            block_tables: `[R, max blocks]`, block ids.
            query_start_loc: `[R + 1]`, the first new token of each sequence.
            seq_lens_tensor: `[R]`, context and new tokens.
            max_query_len: upper bound of the query lengths; ignored.
            alibi_slopes: `[Hq]` float32, or None.
            sliding_window: number of visible keys, the query's own included; None or <= 0 is
                unbounded.
            k_scale: scale of a float8 key cache.
            v_scale: the same for values.

        Returns:
            `[T, Hq, D]`; rows at or past `query_start_loc[-1]` are 0.
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
            tokens = slice(starts[request], starts[request + 1])
            keys = with_context(old_key, table[request], context, k_scale, key[tokens])
            values = with_context(old_value, table[request], context, v_scale, value[tokens])
            rows = QueryRows(query[tokens], context, lengths[request], context, True)
            attend_rows(rows, KeySpan(keys, values), params, out[tokens], None)
        return out

    @staticmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
        """Copy whole blocks from one cache to another, which may be on another device.

        Args:
            src_kv_cache: `[2, B, ...]`.
            dst_kv_cache: `[2, B', ...]`.
            src_to_dst: `[n, 2]`, (source block, target block), read on the host. All sources are
                read before the first target is written.

        Raises:
            ContractError: ids that are not integers or outside the cache, a target that occurs
                twice, or caches that differ in block size or dtype; nothing is written.
        """
        source, target = src_kv_cache, dst_kv_cache
        if source.shape[2:] != target.shape[2:] or source.dtype != target.dtype:
            raise ContractError(
                f"swap_blocks needs blocks of one kind: the source has {tuple(source.shape[2:])} "
                f"{source.dtype} and the target {tuple(target.shape[2:])} {target.dtype} per block"
            )
        source_ids, target_ids = checked_pairs(src_to_dst, source.shape[1], target.shape[1])
        move_blocks(source.unbind(), target.unbind(), source_ids, target_ids)

    @staticmethod
    def copy_blocks(kv_caches: list[Tensor], src_to_dists: Tensor) -> None:
        """Copy whole blocks within the cache of each layer; see `swap_blocks`."""
        for kv_cache in kv_caches:
            PagedAttention.swap_blocks(kv_cache, kv_cache, src_to_dists)
