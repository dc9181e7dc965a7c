"""The write of pages that hold their scales (M16), with the rotation of its heads (P15)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from attnlib.kv_dtype import KVFormat, page_format
from attnlib.kv_rotation import KVRotation, rotation_block
from attnlib.ops.checks import vector_elements
from attnlib.ops.hadamard import LARGEST_INPUT, sign_table, unit_factor
from attnlib.ops.scales import MAX_KV_SCALE
from attnlib.ops.triton.heuristics.tiles import next_power_of_2
from attnlib.ops.triton.kernels.page_store import PageSide
from attnlib.ops.triton.kernels.page_write import PageWriteConfig, write_pages_kernel
from attnlib.ops.triton.kernels.rotary_pages import ScaleStrides
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.quantized_pages import page_kind, page_words

__all__ = ["page_sides", "page_write", "rotary_page_constants"]


def page_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_tokens: int,
    scales: tuple[Any, Any],
    rotation: KVRotation | None,
) -> tuple[tuple[Any, ...], BoundLaunch | None]:
    """What follows the scales among the runtime arguments of a cache write, and its launch; None if
    there is nothing to write.

    Raises:
        ContractError: pages that the kernel cannot address.
    """
    views = (key, value, key_cache, value_cache)
    keys, values = page_sides(*views, scales, rotation)
    num_heads, widest = key_cache.shape[2], max(keys.WORDS_PAD, values.WORDS_PAD)
    block_h = min(next_power_of_2(num_heads), max(1, 1024 // widest))
    constants = {
        "BLOCK_SIZE": key_cache.shape[1],
        "BLOCK_H": block_h,
        "KEYS": keys,
        "VALUES": values,
        "num_warps": 4 if keys.WORDS_PAD * block_h > 256 else 1,
        "enable_fp_fusion": True,
    }
    numbers = (
        num_heads,
        *(stride for rows in (key, value) for stride in rows.stride()[:2]),
        *(stride for view in (key_cache, value_cache, *scales) for stride in view.stride()[:3]),
        _signs(rotation, keys.SIZE, values.SIZE, key.device),
    )
    if not (num_tokens and num_heads):
        return numbers, None
    grid = (num_tokens, triton.cdiv(num_heads, block_h), 1)
    return numbers, BoundLaunch(write_pages_kernel, grid, with_config(constants, PageWriteConfig))


def rotary_page_constants(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scales: tuple[Any, Any],
    rotation: KVRotation | None,
) -> tuple[dict[str, Any], Tensor | None]:
    """The further constants of `rotate_and_write_pages_kernel`, and its signs.

    Args:
        key, value, key_cache, value_cache, scales, rotation: as in `page_sides`.

    Raises:
        ContractError: as `page_sides`.
    """
    keys, values = page_sides(key, value, key_cache, value_cache, scales, rotation)
    strides = ScaleStrides(*scales[0].stride()[:3], *scales[1].stride()[:3])
    signs = _signs(rotation, keys.SIZE, values.SIZE, key.device)
    return {"KEYS": keys, "VALUES": values, "SCALES": strides}, signs


def page_sides(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scales: tuple[Any, Any],
    rotation: KVRotation | None,
) -> tuple[PageSide, PageSide]:
    """How keys and values are stored.

    Args:
        key, value: new rows, `[T, Hkv, D]` and `[T, Hkv, Dv]`.
        key_cache, value_cache: views of pages.
        scales: views of their scales.
        rotation: of heads for the cache, or None.

    Raises:
        ContractError: pages that the kernels cannot address.
    """
    turned = (False, False) if rotation is None else (rotation.keys, rotation.values)
    return (
        _side("key", key, key_cache, scales[0], turned[0]),
        _side("value", value, value_cache, scales[1], turned[1]),
    )


def _side(name: str, rows: Tensor, cache: Tensor, scales: Tensor, turned: bool) -> PageSide:
    stored = page_format(cache, scales)
    assert stored is not None  # callers have four-dimensional scales
    words, padded = page_words(cache, scales, stored)
    size = stored.head_size(cache.shape[3])
    rotated: dict[str, Any] = {}
    if turned:
        rotated = {
            "TURN": rotation_block(size),
            "FACTOR": unit_factor(size),
            "LIMIT": LARGEST_INPUT,
            "LARGEST_HEAD": torch.finfo(rows.dtype).max,
        }
    return PageSide(
        KIND=page_kind(stored),
        LARGEST=stored.largest,
        LARGEST_SCALE=_largest_scale(stored),
        WORDS=words,
        WORDS_PAD=padded,
        VEC=vector_elements(name, rows),
        VEC_C=vector_elements(f"{name}_cache", cache),
        SIZE=size,
        PADDED=padded * 16 // stored.bits,
        **rotated,
    )


def _largest_scale(stored: KVFormat) -> float:
    """The largest scale that a format stores."""
    assert stored.scale_dtype is not None  # a format with scales in the page
    if stored.elements_per_group:
        return 448.0
    return min(MAX_KV_SCALE, torch.finfo(stored.scale_dtype).max)


def _signs(
    rotation: KVRotation | None, size: int, size_v: int, device: torch.device
) -> Tensor | None:
    """The signs of keys, then those of values, float32; None without a rotation."""
    if rotation is None:
        return None
    return sign_table(rotation.seed, device, size, size_v)
