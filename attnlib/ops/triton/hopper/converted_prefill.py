"""The Hopper prefill over 16-bit copies of keys and values: of quantized caches and small blocks.

The prefill kernel for float8 pages (`kernels/converter.py`) converts each tile of keys again for
every 128 query rows, and that for blocks of 1 to 4 tokens (`kernels/gather.py`) gathers it again.
Pages with scales, and float8 in blocks of other sizes, have only a portable one. Long prompts read
the same tiles many times, so that one pass over the whole context before the prefill takes less
time. The copies are packed rows without pages.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from attnlib.kv_rotation import KVRotation
from attnlib.ops.checks import vector_elements
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.hopper_tiles import HopperTile
from attnlib.ops.triton.hopper import sizes as hopper_sizes
from attnlib.ops.triton.hopper.converted_launches import ConvertedPrefill
from attnlib.ops.triton.hopper.descriptors import (
    TransposedView,
)
from attnlib.ops.triton.hopper.prefill_plan import prepare_hopper_prefill
from attnlib.ops.triton.kernels.convert_cache import CopiedSide, convert_cache_kernel
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
    "multiplies_float8",
    "prepare_converted_prefill",
    "prepare_float8_prefill",
    "turned_rotation",
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
    alone: bool = True,
) -> int:
    """Rows of the copies for batches like this one; 0 where the prefill reads the pages.

    Args:
        key: the key cache.
        sizes: head sizes of keys and values.
        max_query_len: query tokens of the longest request.
        group: query heads per KV head.
        alone: the batch has no decodes, which a conversion would wait for.
    """
    num_reqs = batch.seq_lens.shape[0]
    seen = params.window[0], params.attention_chunk_size
    requests = num_reqs + (not alone)
    in_pages, block_size = params.scales_in_page, key.shape[1]
    least = hopper_sizes.copied_tokens(key.itemsize, block_size, in_pages, requests, *seen)
    if max_query_len < least or batch.max_seq_len <= 0 or params.score_function is not None:
        return 0
    only = not in_pages and hopper_sizes.only_copies(key.itemsize, block_size)
    if group < hopper_sizes.COPIED_GROUP and not only:
        return 0
    step, most = (
        hopper_sizes.LENGTH_STEP,
        hopper_sizes.most_copied_keys(key.shape[2], sizes, num_reqs),
    )
    longest = -(-batch.max_seq_len // step) * step  # as `BatchTensors.length_class`
    return num_reqs * longest if longest <= most else 0


def multiplies_float8(call: AttentionCall) -> bool:
    """Whether a prefill over copies has float8 products (M19)."""
    key, value, params = call.key, call.value, call.params
    group = call.query.shape[1] // key.shape[2]
    return (
        params.allow_fp8_queries
        and call.max_query_len >= hopper_sizes.COPIED_TOKENS
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
    shape, num_reqs = call.shape, batch.seq_lens.shape[0]
    scales: tuple[Source | None, Source | None] = (None, None)
    strides: tuple[int | None, ...] = (None,) * 6
    rotation = turned_rotation(call)
    if shape.page_format is not None:
        assert isinstance(params.k_scale, Tensor) and isinstance(params.v_scale, Tensor)
        scales = (K_SCALE, V_SCALE)
        strides = (*params.k_scale.stride()[:3], *params.v_scale.stride()[:3])
        params = replace(params, k_scale=1.0, v_scale=1.0, rotation=None)
    sizes = shape.head_sizes
    copied = _over_copies(call, rows, sizes, query.dtype, params)
    prefill = prepare_hopper_prefill(copied, tile, unpaged=True)
    signs = rotation.sign_bits(*sizes) if rotation else (0, 0)
    convert = BoundLaunch(
        convert_cache_kernel,
        (_PROGRAMS_PER_SM * call.limits.num_sms, 1, 1),
        {
            "NUM_KV_HEADS": num_kv_heads,
            "BLOCK_SIZE": block_size,
            "TOKENS": _TOKENS,
            "KEYS": _side(call, "key", signs[0]),
            "VALUES": _side(call, "value", signs[1]),
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
        rotated=rotation,
    )


def turned_rotation(call: AttentionCall) -> KVRotation | None:
    """The rotation of the pages, where the conversion takes it back."""
    whole = all(size & (size - 1) == 0 for size in call.shape.head_sizes)
    return call.params.rotation if whole and call.params.scales_in_page else None


def _side(call: AttentionCall, name: str, signs: int) -> CopiedSide:
    """The constants of keys or values."""
    shape, params = call.shape, call.params
    is_key = name == "key"
    view, scale = (call.key, params.k_scale) if is_key else (call.value, params.v_scale)
    size, stored = shape.head_sizes[not is_key], shape.page_format
    side = CopiedSide(size, triton.next_power_of_2(size), vector_elements(f"{name}_cache", view))
    if stored is None:
        return side
    assert isinstance(scale, Tensor)
    if not is_key:
        stored = shape.value_format or stored
    ptx, words = 0 if stored.elements_per_group else 89, page_words(view, scale, stored)
    kind = page_kind(stored)
    return side._replace(KIND=kind, PTX=ptx, WORDS=words[0], WORDS_PAD=words[1], SIGNS=signs)


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
