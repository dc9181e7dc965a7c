"""The Hopper prefill over 16-bit copies of keys and values: of quantized caches and small blocks.

The prefill kernel for float8 pages (`kernels/converter.py`) converts each tile of keys again for
every 128 query rows, and that for blocks of 1 to 4 tokens (`kernels/gather.py`) gathers it again.
Pages with scales have only a portable one. Long prompts read the same tiles many times, so that one
pass over the whole context before the prefill takes less time. The copies are packed rows without
pages.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from attnlib.kv_dtype import page_format
from attnlib.ops.checks import vector_elements
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import LENGTH_STEP, BatchTensors
from attnlib.ops.triton.heuristics.hopper_tiles import HopperTile
from attnlib.ops.triton.hopper.converted_launches import ConvertedPrefill
from attnlib.ops.triton.hopper.descriptors import (
    TransposedView,
)
from attnlib.ops.triton.hopper.prefill_plan import prepare_hopper_prefill
from attnlib.ops.triton.hopper.sizes import COPIED_BYTES, COPIED_GROUP, COPIED_TOKENS
from attnlib.ops.triton.kernels.convert_cache import NO_SCALES, convert_cache_kernel
from attnlib.ops.triton.kernels.float8_copy import float8_copy_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.sequence import (
    K_SCALE,
    V_SCALE,
    Source,
)
from attnlib.ops.triton.quantized_pages import page_kind, page_words

__all__ = [
    "FLOAT8_TILE",
    "ConvertedPrefill",
    "copied_rows",
    "copied_sizes",
    "multiplies_float8",
    "prepare_converted_prefill",
    "prepare_float8_prefill",
]

_TOKENS = 32
"""Tokens of a tile of the conversion."""

_PROGRAMS_PER_SM = 8

FLOAT8_TILE = HopperTile(
    128, 4, persistent=True, q_stages=2, consumers=3, consumer_registers=160, producer_registers=32
)


def copied_rows(
    key: Tensor,
    sizes: tuple[int, int],
    batch: BatchTensors,
    params: AttentionParams,
    max_query_len: int,
    group: int,
) -> int:
    """Rows of the copies for batches like this one; 0 where the prefill reads the pages.

    Args:
        key: the key cache.
        sizes: head sizes of keys and values.
        max_query_len: query tokens of the longest request.
        group: query heads per KV head.
    """
    if max_query_len < COPIED_TOKENS or group < COPIED_GROUP or batch.max_seq_len <= 0:
        return 0
    if params.score_function is not None:
        return 0
    longest = -(-batch.max_seq_len // LENGTH_STEP) * LENGTH_STEP  # as `BatchTensors.length_class`
    count = batch.seq_lens.shape[0] * longest
    return count if 2 * count * key.shape[2] * sum(sizes) <= COPIED_BYTES else 0


def multiplies_float8(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> bool:
    """Whether prefills over copies have float8 products (M19)."""
    group = query.shape[1] // key.shape[2]
    return (
        params.allow_fp8_queries
        and key.dtype == torch.float8_e4m3fn
        and key.shape[3] == value.shape[3] == 128
        and 64 % group == 0
        and params.sinks is None
        and params.logits_soft_cap == 0
    )


def prepare_converted_prefill(call: AttentionCall, tile: HopperTile, rows: int) -> ConvertedPrefill:
    """Prepare the launches of calls like this one.

    Args:
        call: over pages.
        tile: of a prefill over 16-bit keys.
        rows: as `copied_rows` returns.
    """
    query, key, value, params, batch = call.query, call.key, call.value, call.params, call.batch
    block_size, num_kv_heads = key.shape[1:3]
    num_reqs, stored = batch.seq_lens.shape[0], page_format(key, params.k_scale)
    sizes = key.shape[3], value.shape[3]
    scales: tuple[Source | None, Source | None] = (None, None)
    strides: tuple[int | None, ...] = (None,) * 6
    words = [(0, 0), (0, 0)]
    format_ = {"KIND": int(NO_SCALES.value), "PTX": 0}
    if stored is not None:
        assert isinstance(params.k_scale, Tensor) and isinstance(params.v_scale, Tensor)
        sizes, scales = copied_sizes(key, value, params), (K_SCALE, V_SCALE)
        ptx = 0 if stored.elements_per_group else 89
        format_ = {"KIND": page_kind(stored), "PTX": ptx}
        sides = (key, params.k_scale), (value, params.v_scale)
        words = [page_words(view, scale, stored) for view, scale in sides]
        strides = (*params.k_scale.stride()[:3], *params.v_scale.stride()[:3])
        params = replace(params, k_scale=1.0, v_scale=1.0)
    copied = _over_copies(call, rows, sizes, query.dtype, params)
    prefill = prepare_hopper_prefill(copied, tile, unpaged=True)
    convert = BoundLaunch(
        convert_cache_kernel,
        (_PROGRAMS_PER_SM * call.limits.num_sms, 1, 1),
        {
            "NUM_KV_HEADS": num_kv_heads,
            "D": sizes[0],
            "DV": sizes[1],
            "D_PAD": triton.next_power_of_2(sizes[0]),
            "DV_PAD": triton.next_power_of_2(sizes[1]),
            "WORDS": words[0][0],
            "WORDS_PAD": words[0][1],
            "DV_WORDS": words[1][0],
            "DV_WORDS_PAD": words[1][1],
            "BLOCK_SIZE": block_size,
            **format_,
            "TOKENS": _TOKENS,
            "VEC_K": vector_elements("key_cache", key),
            "VEC_V": vector_elements("value_cache", value),
            "num_warps": 4,
        },
    )
    numbers = (num_reqs, rows, call.table_stride)
    return ConvertedPrefill(
        prefill,
        convert,
        scales,
        (*numbers, *key.stride()[:3], *value.stride()[:3], *strides),
        rows,
        query.dtype,
        (rows * num_kv_heads * sizes[0], rows * num_kv_heads * sizes[1]),
    )


def _over_copies(
    call: AttentionCall,
    rows: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    params: AttentionParams,
) -> AttentionCall:
    """The call of the prefill over the copies; its keys, values and table have no memory."""
    keys, values = (
        torch.empty(1, rows, call.key.shape[2], size, dtype=dtype, device="meta") for size in sizes
    )
    table = torch.empty(call.batch.seq_lens.shape[0] + 1, 1, dtype=torch.int32, device="meta")
    batch = call.batch._replace(block_table=table)
    return replace(call, key=keys, value=values, batch=batch, params=params)


def prepare_float8_prefill(call: AttentionCall, rows: int) -> ConvertedPrefill:
    """Prepare the launches of calls like this one with float8 queries and products
    (`kernels/float8_prefill.py`), over a cache of e4m3 elements.

    Args:
        call: over pages.
        rows: as `copied_rows` returns.
    """
    key, value, batch = call.key, call.value, call.batch
    block_size, num_kv_heads, head_size = key.shape[1:]
    num_reqs, head_size_v, tile = batch.seq_lens.shape[0], value.shape[3], FLOAT8_TILE
    # Columns of `kernels/float8_copy.py`.
    columns = (rows + 144 * num_reqs + 143) // 16 * 16
    lines = num_kv_heads * head_size_v
    transposed = TransposedView((lines, columns), (head_size_v, tile.block_n))
    copied = _over_copies(call, rows, (head_size, head_size_v), key.dtype, call.params)
    prefill = prepare_hopper_prefill(copied, tile, unpaged=True, transposed=transposed)
    copy = BoundLaunch(
        float8_copy_kernel,
        (4 * call.limits.num_sms, 1, 1),
        {
            "NUM_KV_HEADS": num_kv_heads,
            "D": head_size,
            "DV": head_size_v,
            "BLOCK_SIZE": block_size,
            "TOKENS": tile.block_n,
            "VEC_K": vector_elements("key_cache", key),
            "VEC_V": vector_elements("value_cache", value),
            "num_warps": 4,
        },
    )
    numbers = (num_reqs, rows, call.table_stride)
    return ConvertedPrefill(
        prefill,
        copy,
        (None, None),
        (*numbers, *key.stride()[:3], *value.stride()[:3], *((None,) * 6)),
        rows,
        key.dtype,
        (rows * num_kv_heads * head_size, lines * columns),
    )


def copied_sizes(key: Tensor, value: Tensor, params: AttentionParams) -> tuple[int, int]:
    """The head sizes of keys and values in pages with scales."""
    stored = page_format(key, params.k_scale)
    assert stored is not None  # the caller has checked that pages hold scales
    return stored.head_size(key.shape[3]), stored.head_size(value.shape[3])
