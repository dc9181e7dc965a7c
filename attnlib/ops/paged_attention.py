"""vLLM's older `PagedAttention` interface: a class of static methods over a cache with packed keys.

Code that uses that interface can switch to attnlib and keep its cache. The layout is not the one of
the P-rules (see `packed_cache`). On a GPU, Triton kernels read and write it
(`triton/packed_attention.py`): no call synchronizes with the host, and a CUDA graph can capture all
of them. On a CPU, and for dtypes and block sizes without kernels, plain torch serves it
(`torch/packed_attention.py`). `block_sparse` describes the pattern of block-sparse decode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.addresses import check_starts
from attnlib.ops.block_moves import KeysAndValues, checked_move, move_blocks
from attnlib.ops.block_sparse import BlockSparsePattern
from attnlib.ops.packed_cache import typed_cache
from attnlib.ops.paged_attention_batch import (
    PagedAttentionMetadata,
    check_blocks,
    integer_slots,
    packed_operation,
    params_of,
)

__all__ = ["PagedAttention", "PagedAttentionMetadata"]

_PARTITION_SIZE = 512
"""Keys per partition of vLLM's kernels, for code that sizes buffers by it. The kernels of attnlib
choose the splits of a request themselves, and any block size is allowed."""


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
            key, value: `[T, Hkv, D]`.
            key_cache, value_cache: `[B, Hkv, D / x, N, x]` and `[B, Hkv, D, N]`.
            slot_mapping: T integers, of any shape; a negative slot writes nothing.
            kv_cache_dtype: what uint8 caches hold: "fp8", "fp8_e4m3" or "fp8_e5m2".
            k_scale, v_scale: scales of a float8 cache, floats, 0-d or `[Hkv]` tensors.

        Raises:
            ContractError: on a CPU and under ATTNLIB_VALIDATE, a slot past the cache.
        """
        key_cache = typed_cache(key_cache, kv_cache_dtype)
        value_cache = typed_cache(value_cache, kv_cache_dtype)
        if key_cache.dtype.itemsize > 1:
            k_scale = v_scale = 1.0  # a plain cache has no scales
        packed_operation("packed_write", key, value_cache)(
            key, value, key_cache, value_cache, integer_slots(slot_mapping),
            k_scale=k_scale, v_scale=v_scale,
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
        """Attention of one query token per sequence.

        Args:
            query: `[R, Hq, D]`.
            key_cache: `[B, Hkv, D / x, N, x]`.
            value_cache: `[B, Hkv, D, N]`.
            block_tables: `[R, max blocks]`, block ids.
            seq_lens: `[R]`, keys of each sequence, the query's own included.
            max_seq_len: upper bound of `seq_lens`; the grid follows from it.
            kv_cache_dtype: what uint8 caches hold.
            num_kv_heads: Hkv.
            scale, alibi_slopes: factor of q . k; `[Hq]` float32, or None.
            k_scale, v_scale: scales of a float8 cache.
            tp_rank: tensor-parallel rank, for the block-sparse pattern.
            blocksparse_vert_stride: above 1, attention is block-sparse with this stride.
            blocksparse_local_blocks, blocksparse_block_size, blocksparse_head_sliding_step: see
                `BlockSparsePattern`.

        Returns:
            `[R, Hq, D]`.

        Raises:
            ContractError: a sparse block that is not a whole number of cache blocks, or, on a CPU
                and under ATTNLIB_VALIDATE, blocks outside of the cache.
        """
        key_cache = typed_cache(key_cache, kv_cache_dtype)
        value_cache = typed_cache(value_cache, kv_cache_dtype)
        check_blocks(value_cache, block_tables, seq_lens)
        pattern, heads = None, (query.shape[1], num_kv_heads)
        if (blocksparse_vert_stride or 0) > 1:
            blocks = blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size
            pattern = BlockSparsePattern(*blocks, blocksparse_head_sliding_step, *heads, tp_rank)
            pattern.check(value_cache.shape[3])
        out = torch.empty_like(query)
        packed_operation("packed_decode", query, value_cache)(
            query, key_cache, value_cache, block_tables, seq_lens,
            params_of(key_cache, scale, alibi_slopes, k_scale, v_scale),
            max_seq_len=max_seq_len, out=out, pattern=pattern,
        )  # fmt: skip
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
            key, value: `[T, Hkv, D]` of the new tokens, as given, not as the cache stores them.
            kv_cache_dtype: what uint8 caches hold.
            key_cache: `[B, Hkv, D / x, N, x]`, read for the context of seq_len - query_len keys.
            value_cache: `[B, Hkv, D, N]`, likewise.
            block_tables: `[R, max blocks]`, block ids.
            query_start_loc: `[R + 1]`, the first new token of each sequence.
            seq_lens_tensor: `[R]`, context and new tokens.
            max_query_len: upper bound of the query lengths; the grid follows from it.
            alibi_slopes: `[Hq]` float32, or None.
            sliding_window: number of visible keys, the query's own included; None or <= 0 is
                unbounded.
            k_scale, v_scale: scales of a float8 cache.

        Returns:
            `[T, Hq, D]`; rows at or past `query_start_loc[-1]` are 0.

        Raises:
            ContractError: on a CPU and under ATTNLIB_VALIDATE, blocks outside of the cache, and
                offsets that decrease or end past the queries.
        """
        key_cache = typed_cache(key_cache, kv_cache_dtype)
        value_cache = typed_cache(value_cache, kv_cache_dtype)
        check_blocks(value_cache, block_tables, seq_lens_tensor)
        check_starts("query_start_loc", query_start_loc, query.shape[0])
        left = sliding_window - 1 if sliding_window is not None and sliding_window > 0 else -1
        scale = float(query.shape[-1] ** -0.5)
        out = torch.empty_like(query)
        packed_operation("packed_prefill", query, value_cache)(
            query, key, value, key_cache, value_cache, block_tables, query_start_loc,
            seq_lens_tensor, params_of(key_cache, scale, alibi_slopes, k_scale, v_scale, left),
            max_query_len=max_query_len, out=out,
        )  # fmt: skip
        return out

    @staticmethod
    def swap_blocks(
        src_kv_cache: KeysAndValues, dst_kv_cache: KeysAndValues, src_to_dst: Tensor
    ) -> None:
        """Copy whole blocks from one cache to another, which may be on another device.

        Args:
            src_kv_cache: `[2, B, ...]`, or the pair of keys and values `[B, ...]`.
            dst_kv_cache: `[2, B', ...]`, or such a pair.
            src_to_dst: `[n, 2]`, (source block, target block), read on the host. All sources are
                read before the first target is written.

        Raises:
            ContractError: ids that are not integers or outside the cache, a target that occurs
                twice, or caches that differ in block size or dtype; nothing is written.
        """
        move_blocks(*checked_move(src_kv_cache, dst_kv_cache, src_to_dst))

    @staticmethod
    def copy_blocks(kv_caches: Sequence[KeysAndValues], src_to_dists: Tensor) -> None:
        """Copy whole blocks within the cache of each layer; see `swap_blocks`."""
        # All are checked before the first is written.
        moves = [checked_move(kv_cache, kv_cache, src_to_dists) for kv_cache in kv_caches]
        for move in moves:
            move_blocks(*move)
