"""Splits and kernel of a decode, from the bounds of its batch.

A long request's keys are split over several programs. The split follows Flash-Decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import triton

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.layer_tiles import decode_tile
from attnlib.ops.triton.heuristics.page_tiles import (
    page_ctas_per_sm,
    page_shared_bytes,
)
from attnlib.ops.triton.heuristics.splits import MAX_CTAS_PER_SM, most_splits, splits_of_keys
from attnlib.ops.triton.heuristics.tile_table import depends_on_work, work_class
from attnlib.ops.triton.heuristics.tiles import Tile, shared_bytes
from attnlib.ops.triton.hopper.preference import hopper_decode_keys, latent_decode_keys

__all__ = [
    "DecodeSchedule",
    "DecodeTiling",
    "decode_schedules",
    "decode_tiling",
    "schedule_decode",
]


class DecodeTiling(NamedTuple):
    """Tile and grid of the plain decode kernel.

    Attributes:
        tile: rows and keys of a tile.
        ctas: programs per request and split.
        max_resident_ctas: programs that the chip runs at a time.
        packing: how query heads and tokens share the rows of a tile (compile-time arguments).
    """

    tile: Tile
    ctas: int
    max_resident_ctas: int
    packing: dict[str, int]


@functools.lru_cache(maxsize=512)
def decode_tiling(
    shape: LayerShape, limits: DeviceLimits, max_query_len: int, keys_per_sm: int | None
) -> DecodeTiling:
    """Tile and grid for queries of at most `max_query_len` tokens.

    Args:
        shape: sizes and dtypes of the layer.
        limits: the chip.
        max_query_len: upper bound of the query lengths, in tokens.
        keys_per_sm: class of work that the tile depends on; None takes the tile that serves any.

    Raises:
        UnsupportedConfigError: head sizes for which no tile fits the chip.
    """
    tile = decode_tile(shape, limits, shape.group * max_query_len, keys_per_sm)
    tile_heads = min(shape.group, tile.block_m)
    tile_tokens, head_blocks = tile.block_m // tile_heads, triton.cdiv(shape.group, tile_heads)
    per_sm = _programs_per_sm(tile, shape, limits)
    ctas = shape.num_kv_heads * head_blocks * triton.cdiv(max_query_len, tile_tokens)
    packing = {"TILE_HEADS": tile_heads, "TILE_TOKENS": tile_tokens, "HEAD_BLOCKS": head_blocks}
    return DecodeTiling(tile, ctas, limits.num_sms * per_sm, packing)


def _programs_per_sm(tile: Tile, shape: LayerShape, limits: DeviceLimits) -> int:
    """Programs that a multiprocessor runs at a time, at least 1."""
    sizes, stored = shape.head_sizes, shape.page_format
    if stored is not None:
        query_bytes = shape.query_dtype.itemsize
        values = shape.value_format
        need = page_shared_bytes(tile, stored, *sizes, query_bytes, limits.products, values)
        most = page_ctas_per_sm(tile)
    else:
        need = shared_bytes(
            tile,
            *sizes,
            *shape.element_bytes,
            limits.products,
            shape.score_tiles,
            latent=shape.latent,
            native_fp8=limits.has_fp8,
        )
        most = MAX_CTAS_PER_SM
    return max(1, min(most, limits.shared_memory_per_sm // need))


class DecodeSchedule(NamedTuple):
    """What a decode's launches follow from in the bounds of a batch: part of the launch key.

    Attributes:
        max_query_len: upper bound of the query lengths, at least 1.
        num_splits: upper bound of the splits per request.
        balanced: whether requests are split by their length; else each into `num_splits`.
        keys_per_sm: class of work of the plain kernel's tile.
        uses_hopper: whether the Hopper decode is preferred where it supports the call.
        hopper_keys_per_sm: class of work of its tile.
        max_ctas: CTAs of the Hopper decode, where a prefill runs concurrently; None means all.
    """

    max_query_len: int
    num_splits: int
    balanced: bool
    keys_per_sm: int | None
    uses_hopper: bool
    hopper_keys_per_sm: int | None = None
    max_ctas: int | None = None


def schedule_decode(
    shape: LayerShape,
    limits: DeviceLimits,
    *,
    num_reqs: int,
    max_query_len: int,
    visible: int,
    num_splits: int | None = None,
    kernels: str = "auto",
) -> DecodeSchedule:
    """Splits and kernel preference of a decode, by upper bounds only.

    Args:
        shape: sizes and dtypes of the layer.
        limits: the chip.
        num_reqs: requests of the batch.
        max_query_len: upper bound of the query lengths, in tokens.
        visible: the most keys that a request's queries see (`visible_bound`).
        num_splits: None chooses; a number splits every request into that many.
        kernels: "auto", "hopper" or "portable"; see `paged_decode`.
    """
    if num_splits is not None:
        return DecodeSchedule(max(1, max_query_len), num_splits, False, None, False)
    of_length = decode_schedules(
        shape, limits, num_reqs=num_reqs, max_query_len=max_query_len, kernels=kernels
    )
    return of_length(visible)


def decode_schedules(
    shape: LayerShape,
    limits: DeviceLimits,
    *,
    num_reqs: int,
    max_query_len: int,
    most_visible: int | None = None,
    kernels: str = "auto",
) -> Callable[[int], DecodeSchedule]:
    """The schedule of a decode as a function of the length of its longest request, in tokens.

    A builder keeps it for batches of equal sizes, whose lengths grow in every step.

    Args:
        shape, limits, num_reqs, max_query_len, kernels: see `schedule_decode`.
        most_visible: the most keys that a request's queries see of any length; None has no bound.
    """
    max_query_len = max(1, max_query_len)
    num_sms, tuned = limits.num_sms, limits.tuned
    counts = (num_reqs, shape.num_kv_heads)
    hopper_keys = _hopper_keys(shape, limits, num_reqs, max_query_len, kernels)
    work_matters = depends_on_work("decode", tuned)
    hopper_work_matters = depends_on_work("hopper_decode", tuned)

    def splits_for(work: int | None) -> tuple[int, int]:
        tiling = decode_tiling(shape, limits, max_query_len, work)
        most = most_splits(num_reqs, tiling.ctas, tiling.max_resident_ctas)
        return tiling.tile.block_n, most

    of_any_work = None if work_matters else splits_for(None)

    def schedule(max_seq_len: int) -> DecodeSchedule:
        visible = max_seq_len
        if most_visible is not None and visible > most_visible:
            visible = most_visible
        work = hopper_work = None
        if work_matters:
            work = work_class(*counts, visible, num_sms)
        block_n, most = of_any_work or splits_for(work)
        num_splits = splits_of_keys(visible, block_n, most)
        uses_hopper = hopper_keys is not None and visible >= hopper_keys
        if uses_hopper and hopper_work_matters:
            hopper_work = work_class(*counts, visible, num_sms)
        return DecodeSchedule(max_query_len, num_splits, True, work, uses_hopper, hopper_work)

    return schedule


def _hopper_keys(
    shape: LayerShape, limits: DeviceLimits, num_reqs: int, max_query_len: int, kernels: str
) -> int | None:
    """Visible keys from which the Hopper decode is preferred; None where it never is."""
    if limits.capability[0] != 9 or kernels == "portable":
        return None
    if kernels == "hopper":
        return 0
    if shape.latent:
        return latent_decode_keys(num_reqs, shape.num_heads, max_query_len, limits.num_sms)
    sizes = (num_reqs, shape.num_kv_heads, limits.num_sms)
    return hopper_decode_keys(*sizes, shape.cache_dtype, shape.head_size)
