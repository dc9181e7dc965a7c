"""Choose the keys that queries attend to (M14): launches of the two Triton kernels."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics.device import device_guard, limits_of
from attnlib.ops.triton.heuristics.index_chunks import MAX_GRID, IndexChunks
from attnlib.ops.triton.heuristics.tiles import next_power_of_2
from attnlib.ops.triton.kernels.key_indexer import (
    IndexConfig,
    index_scores_kernel,
    index_select_kernel,
)
from attnlib.ops.triton.launch.constants import reads_bytes
from attnlib.ops.triton.launch.scales import kv_kind
from attnlib.ops.triton.launch.settle import settle_keys
from attnlib.sparse.key_selection import KeySelection

__all__ = ["select_keys"]

_COMPUTE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def select_keys(
    query: Tensor,
    weights: Tensor | None,
    key_cache: Tensor,
    key_scales: Tensor | None,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    selection: KeySelection,
    *,
    local_blocks: int = 0,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
) -> None:
    """Write the `max_blocks` blocks of keys with the largest scores of each query token to `out`.

    No host sync: grids and workspace follow from the bounds, and a CUDA graph captures the call.
    The workspace has at most 256 MiB, or the float32 scores of one query token if these are more.

    Args:
        query: `[T, Hi, Di]` float16, bfloat16 or float32, last stride 1.
        max_query_len, max_seq_len: upper bounds of the query and the sequence lengths.
        weights, key_cache, key_scales, block_table: as in `attnlib.ops.torch.key_indexer`.
        query_start_loc, seq_lens, selection, local_blocks, out: as there.
        query_start_loc_cpu, seq_lens_cpu: as there.

    Raises:
        ContractError: tensors that the kernels cannot address, blocks of more than 4096 tokens, or
            a `max_seq_len` of more than 65535 tiles of keys (8 million tokens, where 128 is a
            multiple of the block size).
    """
    num_tokens, num_reqs, num_lists = query.shape[0], query_start_loc.shape[0] - 1, out.shape[1]
    if num_tokens == 0 or num_lists == 0:
        return
    _check(query, key_cache, block_table, out, selection)
    chunks = IndexChunks.of(num_tokens, num_reqs, num_lists, selection, max_query_len, max_seq_len)
    workspace = torch.empty(chunks.scores, dtype=torch.float32, device=query.device)
    as_bytes = reads_bytes(key_cache.dtype, limits_of(query))
    keys = key_cache.view(torch.uint8) if as_bytes else key_cache
    config = _score_config(query, keys, weights, key_scales, key_cache.dtype, chunks, selection)
    strides = _strides(query, weights, keys, key_scales, block_table)
    settle_keys(index_scores_kernel, index_select_kernel)
    with device_guard(query):
        for first, count in chunks.launches():
            index_scores_kernel[(count, chunks.key_tiles)](
                *(query, keys, workspace, query_start_loc, seq_lens, block_table, weights),
                *(key_scales, num_reqs, first, local_blocks, chunks.columns, *strides),
                CONFIG=config,
                num_warps=4 if config.BLOCKS * config.SELECT_PAD <= 128 else 8,
                num_stages=3,
            )
            index_select_kernel[(count * chunks.tile_tokens, num_lists)](
                *(workspace, out, query_start_loc, seq_lens, num_reqs, first, chunks.columns),
                *(num_tokens, out.shape[2], *out.stride()[:2]),
                CONFIG=_select_config(out, chunks, selection),
                num_warps=8,
            )


def _strides(
    query: Tensor,
    weights: Tensor | None,
    keys: Tensor,
    key_scales: Tensor | None,
    block_table: Tensor,
) -> tuple[int, ...]:
    """Those of the kernel that writes scores, in its order; 0 for what is None."""
    of_weights = 0 if weights is None else weights.stride(0)
    of_scales = (0, 0) if key_scales is None else key_scales.stride()
    rows = (block_table.stride(0), *query.stride()[:2], of_weights)
    return (*rows, *keys.stride()[:2], *of_scales)


def _score_config(
    query: Tensor,
    keys: Tensor,
    weights: Tensor | None,
    key_scales: Tensor | None,
    cache_dtype: torch.dtype,
    chunks: IndexChunks,
    selection: KeySelection,
) -> IndexConfig:
    """The constants of the kernel that writes scores."""
    num_heads, size = query.shape[1:]
    return IndexConfig(
        HEADS=num_heads,
        HEADS_PAD=max(16, next_power_of_2(num_heads)),
        SIZE=size,
        SIZE_PAD=max(16, next_power_of_2(size)),
        SELECT=selection.block_size,
        SELECT_PAD=next_power_of_2(selection.block_size),
        BLOCK_SIZE=keys.shape[1],
        BLOCKS=chunks.blocks,
        TILE_TOKENS=chunks.tile_tokens,
        HAS_WEIGHTS=weights is not None,
        HAS_SCALES=key_scales is not None,
        KV_KIND=kv_kind(cache_dtype, limits_of(query).has_fp8),
        COMPUTE=_COMPUTE[query.dtype],
        VEC_Q=_vector(query),
        VEC_K=_vector(keys),
    )


def _select_config(out: Tensor, chunks: IndexChunks, selection: KeySelection) -> IndexConfig:
    """The constants of the kernel that selects."""
    return IndexConfig(
        HEADS=out.shape[1],
        SELECT=selection.block_size,
        TILE_TOKENS=chunks.tile_tokens,
        LANES=min(4096, max(256, next_power_of_2(chunks.columns))),
    )


def _vector(tensor: Tensor) -> int:
    """Elements per 16 bytes if every row of the tensor starts on a 16-byte boundary, else 1."""
    elements = 16 // tensor.element_size()
    whole = all(stride % elements == 0 for stride in tensor.stride()[:2])
    return elements if whole and tensor.data_ptr() % 16 == 0 else 1


def _check(
    query: Tensor, key_cache: Tensor, block_table: Tensor, out: Tensor, selection: KeySelection
) -> None:
    if query.dtype not in _COMPUTE:
        raise ContractError(
            f"index queries are {query.dtype}; the kernels take float16, bfloat16 and float32"
        )
    for name, tensor in (
        ("query", query),
        ("key_cache", key_cache),
        ("block_table", block_table),
        ("out", out),
    ):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ContractError(
                f"{name} of the indexer has last stride {tensor.stride(-1)}; it must be 1: call "
                ".contiguous()",
                rule="M14",
            )
    if selection.block_size > 4096:
        raise ContractError(
            f"block_size={selection.block_size} of the key selection; the kernels take at most "
            "4096 tokens per block",
            rule="M14",
        )
    if out.shape[1] > MAX_GRID:
        raise ContractError(f"{out.shape[1]} index heads exceed the limit of {MAX_GRID}")
