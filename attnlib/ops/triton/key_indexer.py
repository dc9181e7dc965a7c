"""Choose the keys that queries attend to (M14): launches of the two Triton kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics.device import device_guard, limits_of
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

_MAX_SCORES = 1 << 26
"""Most scores in the workspace: 256 MiB. A batch with more is computed in chunks of queries; a
chunk has at least one query token, whose scores are the lists of a token times the blocks of
`max_seq_len`."""
_MAX_TILE_TOKENS = 16
_TILE_KEYS = 128
_MAX_GRID = 65535
"""Most programs along the second axis of a grid."""
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

    No host sync; grids and workspace follow from the upper bounds, so that a CUDA graph captures
    the call. The workspace has at most 256 MiB, or the float32 scores of one query token if these
    are more: with 2^26 and more blocks in all lists of a token.

    Args:
        query: `[T, Hi, Di]` float16, bfloat16 or float32, last stride 1.
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of the sequence lengths.
        weights, key_cache, key_scales, block_table: as in `attnlib.ops.torch.key_indexer`.
        query_start_loc, seq_lens, selection, local_blocks, out: likewise.
        query_start_loc_cpu, seq_lens_cpu: likewise.

    Raises:
        ContractError: tensors that the kernels cannot address, blocks of more than 4096 tokens, or
            a `max_seq_len` of more than 65535 tiles of keys (8 million tokens, where 128 is a
            multiple of the block size).
    """
    num_tokens = query.shape[0]
    if num_tokens == 0 or out.shape[1] == 0:
        return
    _check(query, key_cache, block_table, out, selection)
    bounds = (max_query_len, max_seq_len)
    chunks = _divide(query_start_loc, num_tokens, out.shape[1], selection, *bounds)
    workspace = torch.empty(chunks.scores, dtype=torch.float32, device=query.device)
    as_bytes = reads_bytes(key_cache.dtype, limits_of(query))
    keys = key_cache.view(torch.uint8) if as_bytes else key_cache
    config = _score_config(query, keys, weights, key_scales, key_cache.dtype, chunks, selection)
    batch, num_reqs = (query_start_loc, seq_lens), query_start_loc.shape[0] - 1
    strides = (block_table.stride(0), *query.stride()[:2])
    strides += (0 if weights is None else weights.stride(0), *keys.stride()[:2])
    strides += (0, 0) if key_scales is None else key_scales.stride()
    settle_keys(index_scores_kernel, index_select_kernel)
    with device_guard(query):
        for first in range(0, chunks.all_tiles, chunks.tiles):
            count = min(chunks.tiles, chunks.all_tiles - first)
            index_scores_kernel[(count, chunks.key_tiles)](
                *(query, keys, workspace, *batch, block_table, weights, key_scales),
                *(num_reqs, first, local_blocks, chunks.columns, *strides),
                CONFIG=config,
                num_warps=4 if config.BLOCKS * config.SELECT_PAD <= 128 else 8,
                num_stages=3,
            )
            index_select_kernel[(count * chunks.tile_tokens, out.shape[1])](
                *(workspace, out, *batch, num_reqs, first, chunks.columns, num_tokens),
                *(out.shape[2], *out.stride()[:2]),
                CONFIG=_select_config(out, chunks, selection),
                num_warps=8,
            )


class _Chunks(NamedTuple):
    """How the scores of a batch are divided over launches and programs.

    Attributes:
        columns: blocks of keys of the longest request.
        scores_of_token: lists of a token times `columns`.
        tile_tokens: query tokens of a tile.
        all_tiles, tiles: tiles of query tokens, and those of one launch.
        blocks, key_tiles: blocks of keys of a program, and programs for `columns`.
    """

    columns: int
    scores_of_token: int
    tile_tokens: int
    all_tiles: int
    tiles: int
    blocks: int
    key_tiles: int

    @property
    def scores(self) -> int:
        """Scores of one launch."""
        return self.tiles * self.tile_tokens * self.scores_of_token


def _divide(
    query_start_loc: Tensor,
    num_tokens: int,
    num_lists: int,
    selection: KeySelection,
    max_query_len: int,
    max_seq_len: int,
) -> _Chunks:
    """Divide the scores of a batch.

    Raises:
        ContractError: a bound of the lengths that needs more programs than a grid has.
    """
    columns = max(1, triton.cdiv(max_seq_len, selection.block_size))
    scores_of_token = num_lists * columns
    tile_tokens = _tokens_of_tile(scores_of_token, max_query_len)
    all_tiles = num_tokens // tile_tokens + query_start_loc.shape[0]
    blocks = max(1, _TILE_KEYS // next_power_of_2(selection.block_size))
    key_tiles = triton.cdiv(columns, blocks)
    if key_tiles > _MAX_GRID:
        raise ContractError(
            f"max_seq_len={max_seq_len} needs {key_tiles} tiles of {blocks} blocks; the kernels "
            f"take at most {_MAX_GRID}: pass a smaller bound",
            rule="M14",
        )
    tiles = max(1, min(all_tiles, _MAX_SCORES // (tile_tokens * scores_of_token)))
    return _Chunks(columns, scores_of_token, tile_tokens, all_tiles, tiles, blocks, key_tiles)


def _score_config(
    query: Tensor,
    keys: Tensor,
    weights: Tensor | None,
    key_scales: Tensor | None,
    cache_dtype: torch.dtype,
    chunks: _Chunks,
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


def _select_config(out: Tensor, chunks: _Chunks, selection: KeySelection) -> IndexConfig:
    """The constants of the kernel that selects."""
    return IndexConfig(
        HEADS=out.shape[1],
        SELECT=selection.block_size,
        TILE_TOKENS=chunks.tile_tokens,
        LANES=min(4096, max(256, next_power_of_2(chunks.columns))),
    )


def _tokens_of_tile(scores_of_token: int, max_query_len: int) -> int:
    """Query tokens of a tile, a power of two: at most those whose scores fit the workspace."""
    fitting = max(1, _MAX_SCORES // scores_of_token)
    return min(
        _MAX_TILE_TOKENS,
        next_power_of_2(max(1, max_query_len)),
        1 << (fitting.bit_length() - 1),
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
    if out.shape[1] > _MAX_GRID:
        raise ContractError(f"{out.shape[1]} index heads exceed the limit of {_MAX_GRID}")
