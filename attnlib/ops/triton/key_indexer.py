"""Choose the keys that queries attend to (M14): launches of the two Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.triton.heuristics.device import device_guard, limits_of
from attnlib.ops.triton.heuristics.tiles import next_power_of_2
from attnlib.ops.triton.kernels.key_indexer import index_scores_kernel, index_select_kernel
from attnlib.ops.triton.launch.constants import reads_bytes
from attnlib.ops.triton.launch.scales import kv_kind
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
    num_tokens, num_heads, size = query.shape
    if num_tokens == 0 or out.shape[1] == 0:
        return
    _check(query, key_cache, block_table, out, selection)
    limits = limits_of(query)
    select = selection.block_size
    columns = max(1, triton.cdiv(max_seq_len, select))
    list_heads = out.shape[1]
    scores_of_token = list_heads * columns
    tile_tokens = _tokens_of_tile(scores_of_token, max_query_len)
    num_tiles = num_tokens // tile_tokens + query_start_loc.shape[0]
    select_pad = next_power_of_2(select)
    blocks = max(1, _TILE_KEYS // select_pad)
    key_tiles = triton.cdiv(columns, blocks)
    if key_tiles > _MAX_GRID:
        raise ContractError(
            f"max_seq_len={max_seq_len} needs {key_tiles} tiles of {blocks} blocks; the kernels "
            f"take at most {_MAX_GRID}: pass a smaller bound",
            rule="M14",
        )
    scores_of_tile = tile_tokens * scores_of_token
    tiles_of_chunk = max(1, min(num_tiles, _MAX_SCORES // scores_of_tile))
    workspace = torch.empty(
        tiles_of_chunk * scores_of_tile, dtype=torch.float32, device=query.device
    )
    keys = key_cache.view(torch.uint8) if reads_bytes(key_cache.dtype, limits) else key_cache
    lanes = min(4096, max(256, next_power_of_2(columns)))
    with device_guard(query):
        for first in range(0, num_tiles, tiles_of_chunk):
            count = min(tiles_of_chunk, num_tiles - first)
            index_scores_kernel[(count, key_tiles)](
                query, keys, workspace, query_start_loc, seq_lens, block_table, weights,
                key_scales, query_start_loc.shape[0] - 1, first, local_blocks, columns,
                block_table.stride(0), *query.stride()[:2],
                0 if weights is None else weights.stride(0), *keys.stride()[:2],
                *((0, 0) if key_scales is None else key_scales.stride()),
                HAS_WEIGHTS=weights is not None, HAS_SCALES=key_scales is not None,
                HEADS=num_heads, HEADS_PAD=max(16, next_power_of_2(num_heads)), SIZE=size,
                SIZE_PAD=max(16, next_power_of_2(size)), SELECT=select, SELECT_PAD=select_pad,
                BLOCK_SIZE=key_cache.shape[1], BLOCKS=blocks, TILE_TOKENS=tile_tokens,
                KV_KIND=kv_kind(key_cache.dtype, limits.has_fp8),
                COMPUTE=_COMPUTE[query.dtype], VEC_Q=_vector(query), VEC_K=_vector(keys),
                num_warps=4 if blocks * select_pad <= 128 else 8, num_stages=3,
            )  # fmt: skip
            index_select_kernel[(count * tile_tokens, list_heads)](
                workspace, out, query_start_loc, seq_lens, query_start_loc.shape[0] - 1, first,
                columns, num_tokens, out.shape[2], *out.stride()[:2], HEADS=list_heads,
                SELECT=select, TILE_TOKENS=tile_tokens, LANES=lanes, num_warps=8,
            )  # fmt: skip


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
        ("query", query), ("key_cache", key_cache), ("block_table", block_table), ("out", out),
    ):  # fmt: skip
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
