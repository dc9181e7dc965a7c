"""Launches over pages that hold their scales (M16): cache write, decode and prefill.

The operations `write_kv`, `paged_decode` and `paged_prefill` and step plans come here when
`k_scale` and `v_scale` are the views of the scales in the pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.kv_dtype import KVFormat, page_format
from attnlib.ops.params import AttentionParams
from attnlib.ops.scales import MAX_KV_SCALE
from attnlib.ops.triton.heuristics.device import DeviceLimits, programmatic_launch
from attnlib.ops.triton.heuristics.page_tiles import (
    choose_page_prefill_tile,
    page_shared_bytes,
)
from attnlib.ops.triton.heuristics.splits import (
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    paged_decode_workspace_bytes,
)
from attnlib.ops.triton.heuristics.tiles import Tile, next_power_of_2
from attnlib.ops.triton.kernels.page_attention import page_decode_kernel, page_prefill_kernel
from attnlib.ops.triton.kernels.page_formats import (
    PAGE_E4M3,
    PAGE_INT4,
    PAGE_INT8,
    PAGE_MXFP4,
    PAGE_NVFP4,
)
from attnlib.ops.triton.kernels.page_write import write_pages_kernel
from attnlib.ops.triton.kernels.quant import KV_E4M3_BYTES, KV_PLAIN
from attnlib.ops.triton.launch.attention import (
    BatchTensors,
    PlainAttention,
    attention_constants,
    attention_numbers,
    compute_dtype,
)
from attnlib.ops.triton.launch.bound import BoundLaunch

__all__ = ["page_decode", "page_kind", "page_prefill", "page_words", "page_write"]

_KINDS = {
    "int8_per_token_head": int(PAGE_INT8.value),
    "fp8_per_token_head": int(PAGE_E4M3.value),
    "int4_per_group": int(PAGE_INT4.value),
    "nvfp4": int(PAGE_NVFP4.value),
    "mxfp4": int(PAGE_MXFP4.value),
}
_UNUSED = ("D", "KV_KIND", "K_SCALE_KIND", "V_SCALE_KIND", "LATENT", "VEC_Q", "VEC_O")
"""Constants of the plain kernels that these have not."""
_LANES = 16
"""Least words of a tile's row: tensor cores multiply 16 elements at a time."""


def page_kind(stored: KVFormat) -> int:
    """The `PAGE_*` constant of a format."""
    return _KINDS[stored.name]


def page_write(
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    num_tokens: int,
) -> tuple[tuple[int, ...], BoundLaunch | None]:
    """The runtime numbers and the launch of a cache write; None if there is nothing to write.

    Raises:
        ContractError: pages that the kernel cannot address.
    """
    stored = _format(key_cache, k_scale)
    sides = ((key_cache, k_scale), (value_cache, v_scale))
    (words, padded), (words_v, padded_v) = (
        page_words(view, scale, stored) for view, scale in sides
    )
    num_heads = key_cache.shape[2]
    block_h = min(next_power_of_2(num_heads), max(1, 1024 // max(padded, padded_v)))
    assert stored.scale_dtype is not None  # a format with scales in the page
    constants = {
        "BLOCK_SIZE": key_cache.shape[1],
        "WORDS": words,
        "WORDS_PAD": padded,
        "DV_WORDS": words_v,
        "DV_PAD": padded_v,
        "BLOCK_H": block_h,
        "KIND": page_kind(stored),
        "LARGEST": stored.largest,
        "LARGEST_SCALE": 448.0
        if stored.elements_per_group
        else min(MAX_KV_SCALE, torch.finfo(stored.scale_dtype).max),
        "num_warps": 4 if padded * block_h > 256 else 1,
        "enable_fp_fusion": True,
    }
    numbers = (
        *key_cache.stride()[:3], *value_cache.stride()[:3], *k_scale.stride()[:3],
        *v_scale.stride()[:3],
    )  # fmt: skip
    if not (num_tokens and num_heads):
        return numbers, None
    grid = (num_tokens, triton.cdiv(num_heads, block_h), 1)
    return numbers, BoundLaunch(write_pages_kernel, grid, constants)


def page_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    tiling: Any,
    num_splits: int,
    balanced: bool,
    combine: BoundLaunch | None,
) -> PlainAttention:
    """The launches of a decode.

    Args:
        tiling: tile and grid, `paged_decode.DecodeTiling`.
        num_splits, balanced: of the schedule.
        combine: the kernel that combines splits; None where nothing is split.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device.
    """
    constants, strides = _constants(query, key, value, out, lse is not None, params, limits)
    num_tokens, num_heads, head_size = query.shape
    head_size_v, tile = constants["DV"], tiling.tile
    sizes = (head_size, head_size_v, query.element_size())
    _check_bytes(tile, _format(key, params.k_scale), *sizes, limits)
    constants |= {
        **tiling.packing,
        **programmatic_launch(limits),
        "SPLIT": num_splits > 1,
        "BALANCED": balanced,
        "MIN_TILES": MIN_TILES_PER_SPLIT,
        "MAX_SPLITS": MAX_SPLITS,
        **_launch_options(tile),
    }
    stride_lt = 0 if lse is None else lse.stride(0)
    grid = (tiling.ctas, num_splits, batch.seq_lens.shape[0] + 1)
    return PlainAttention(
        limits,
        query.get_device(),
        BoundLaunch(page_decode_kernel, grid, constants),
        attention_numbers(query, key, value, batch.query_start_loc, out, lse, params),
        0 if batch.block_table is None else batch.block_table.stride(0),
        (num_splits, tiling.ctas / tiling.max_resident_ctas, num_heads, *strides),
        as_bytes=True,
        is_decode=True,
        combine=combine,
        score_tensors=params.layer_score_tensors(),
        combine_tail=(num_splits, num_tokens, num_heads, *out.stride()[:2], stride_lt),
        workspace_bytes=paged_decode_workspace_bytes(
            num_tokens, num_heads, head_size_v, num_splits
        ),
    )


def page_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    limits: DeviceLimits,
    rows: int,
) -> PlainAttention:
    """The launch of a prefill.

    Args:
        rows: query heads per KV head times the longest query of the batch.

    Raises:
        ContractError, UnsupportedConfigError: as `page_decode`.
    """
    constants, strides = _constants(query, key, value, out, lse is not None, params, limits)
    num_tokens, num_heads, head_size = query.shape
    stored, group = _format(key, params.k_scale), constants["GROUP"]
    sizes = (head_size, constants["DV"], query.element_size())
    tile = choose_page_prefill_tile(rows, stored, *sizes, limits)
    _check_bytes(tile, stored, *sizes, limits)
    packing = _packing(tile, group)
    constants |= {**packing, **_launch_options(tile)}
    num_tiles = num_tokens // packing["TILE_TOKENS"] + batch.query_start_loc.shape[0]
    grid = (num_tiles, num_heads // group * packing["HEAD_BLOCKS"], 1)
    return PlainAttention(
        limits,
        query.get_device(),
        BoundLaunch(page_prefill_kernel, grid, constants),
        attention_numbers(query, key, value, batch.query_start_loc, out, lse, params),
        0 if batch.block_table is None else batch.block_table.stride(0),
        (num_tiles, *strides),
        as_bytes=True,
        is_decode=False,
        score_tensors=params.layer_score_tensors(),
    )


def _constants(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, has_lse: bool, params: AttentionParams,
    limits: DeviceLimits,
) -> tuple[dict[str, Any], tuple[int, ...]]:  # fmt: skip
    """The compile-time arguments that decode and prefill share, and the strides of the scales."""
    assert isinstance(params.k_scale, Tensor) and isinstance(params.v_scale, Tensor)
    stored = _format(key, params.k_scale)
    without_scales = replace(params, k_scale=1.0, v_scale=1.0)
    shared = attention_constants(query, key, value, out, has_lse, without_scales, limits)
    words, padded = page_words(key, params.k_scale, stored)
    words_v, padded_v = page_words(value, params.v_scale, stored)
    is_mxfp4 = page_kind(stored) == PAGE_MXFP4.value
    ptx = 0
    if limits.capability >= (8, 0) and query.dtype.itemsize == 2 and not stored.elements_per_group:
        ptx = 89 if limits.has_fp8 else 80
    constants = {name: value for name, value in shared.items() if name not in _UNUSED} | {
        "DV": stored.head_size(value.shape[3]),
        "WORDS": words,
        "WORDS_PAD": padded,
        "DV_WORDS": words_v,
        "DV_PAD": padded_v,
        "KIND": page_kind(stored),
        # float16 holds the elements, and takes fewer conversions than bfloat16. Elements of mxfp4
        # times their scales may exceed it, and are exact in bfloat16.
        "COMPUTE": compute_dtype(query.dtype, (KV_PLAIN if is_mxfp4 else KV_E4M3_BYTES).value),
        "PTX": ptx,
        "VEC_K": max(1, shared["VEC_K"] // 2),
        "VEC_V": max(1, shared["VEC_V"] // 2),
    }
    return constants, (*params.k_scale.stride()[:3], *params.v_scale.stride()[:3])


def _format(key: Tensor, k_scale: float | Tensor) -> KVFormat:
    found = page_format(key, k_scale)
    assert found is not None  # callers have four-dimensional scales
    return found


def page_words(view: Tensor, scales: Tensor, stored: KVFormat) -> tuple[int, int]:
    """16-bit words of a head, and of a row of a tile.

    Raises:
        ContractError: heads that are no whole words, or scales that cannot be loaded at once.
    """
    size = view.shape[3]
    if size % 2 or any(stride % 2 for stride in view.stride()[:3]):
        raise ContractError(
            f"a cache of {stored.name} has {size} bytes per head and strides {view.stride()}; the "
            "Triton kernels read words of two bytes: use an even head size, or backend='torch'",
            rule="P13",
        )
    together = max(1, stored.groups_per_head)
    if any(stride % together for stride in scales.stride()[:3]):
        raise ContractError(
            f"scales of {stored.name} have strides {scales.stride()}; they must be multiples of "
            f"{together}, so that the scales of a head are loaded at once",
            rule="P13",
        )
    return size // 2, max(_LANES, next_power_of_2(size // 2))


def _packing(tile: Tile, group: int) -> dict[str, int]:
    heads = min(group, tile.block_m)
    return {
        "TILE_HEADS": heads,
        "TILE_TOKENS": tile.block_m // heads,
        "HEAD_BLOCKS": triton.cdiv(group, heads),
    }


def _launch_options(tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }


def _check_bytes(
    tile: Tile,
    stored: KVFormat,
    head_size: int,
    head_size_v: int,
    query_bytes: int,
    limits: DeviceLimits,
) -> None:
    sizes = (head_size, head_size_v, query_bytes)
    need = page_shared_bytes(tile, stored, *sizes, limits.products)
    if need > limits.shared_memory:
        raise UnsupportedConfigError(
            f"head sizes {head_size} and {head_size_v} of {stored.name} need {need} bytes of "
            f"shared memory, the device has {limits.shared_memory}: use the torch backend",
            backend="triton",
        )
