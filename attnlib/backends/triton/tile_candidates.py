"""Candidate tiles of an operation for `attnlib tune`: pure functions of the case and of the limits
of the chip.

The grid is small on purpose. Tiles outside it either do not fit the shared memory of a chip, or
were far from the best one on an H200.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from attnlib.backends.triton.spec_shape import layer_shape
from attnlib.backends.triton.tile_groups import case_window, case_work
from attnlib.ops.triton.heuristics.choose_tiles import (
    TileRequest,
    choose_decode_tile,
    choose_latent_tile,
    choose_prefill_tile,
)
from attnlib.ops.triton.heuristics.hopper_decode_tiles import (
    DecodeTile,
    choose_hopper_decode_tile,
    decode_shared_bytes,
    supports_one_warp,
)
from attnlib.ops.triton.heuristics.hopper_tiles import (
    SHARED_MEMORY,
    HopperTile,
    choose_hopper_tile,
)
from attnlib.ops.triton.heuristics.hopper_tiles import shared_bytes as hopper_bytes
from attnlib.ops.triton.heuristics.tile_table import visible_class
from attnlib.ops.triton.heuristics.tiles import (
    Tile,
    latents_in_place,
    next_power_of_2,
    shared_bytes,
)

if TYPE_CHECKING:
    from attnlib.bench.case import BenchCase
    from attnlib.ops.triton.heuristics.device import DeviceLimits  # imports triton at run time

__all__ = ["tile_candidates"]


def _numbers(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, numbers.split())) for numbers in text.split(","))


_DECODE = _numbers(
    "64 3 4, 64 2 4, 32 3 4, 128 2 4, 32 2 2, 32 4 4, 64 4 4, 128 3 4, 64 3 8, 128 2 8, "
    "32 2 4, 16 4 4"
)
"""(block_n, num_stages, num_warps)"""
_PREFILL = _numbers(
    "128 128 8 2, 128 64 8 2, 128 64 8 3, 128 128 8 3, 128 64 4 3, 64 64 4 3, 64 128 4 3, "
    "128 32 8 3, 128 64 4 2, 64 64 4 2, 64 32 4 3, 64 128 4 2, 128 32 4 3, 64 32 4 2, "
    "32 32 4 2, 64 16 4 2, 32 64 8 2"
)
"""(block_m, block_n, num_warps, num_stages)"""
_LATENT = _numbers(
    "64 64 8 2, 64 32 8 3, 64 32 8 2, 64 32 8 4, 32 32 8 3, 32 64 8 2, 32 32 8 2, 16 32 4 3, "
    "16 32 4 4, 16 64 8 3, 16 32 8 4, 16 32 8 2, 16 64 4 2"
)
"""(block_m, block_n, num_warps, num_stages)"""
_HOPPER_DECODE = _numbers("128 2, 64 4, 64 3, 128 3, 128 4, 64 2, 64 6, 128 6, 64 8")
"""(block_n, stages)"""


def tile_candidates(case: BenchCase, op: str, limits: DeviceLimits) -> list[dict[str, Any]]:
    """Distinct tiles for a case: the current choice, then others that fit the shared memory of the
    chip.
    """
    sizes = (case.head_size, case.head_size_v or case.head_size)
    if op == "hopper_prefill":
        return _distinct(_hopper_prefill(case, sizes, limits))
    if op == "hopper_decode":
        return _distinct(_hopper_decode(case, sizes, limits))
    element_bytes = (case.spec.dtype.itemsize, case.spec.kv_dtype.itemsize)
    rows = case.batch.max_query_len * case.spec.group_size
    memory, products = limits.shared_memory, limits.products
    request = TileRequest(
        sizes, element_bytes, rows, memory, products, 0, limits.has_fp8, limits.tuned
    )
    in_place = latents_in_place(limits.capability, *element_bytes, aligned=True)
    if op == "latent":
        current = choose_latent_tile(request, in_place)
        most = min(next_power_of_2(rows), 64 if in_place or limits.products != "async" else 32)
        others = [Tile(*numbers) for numbers in _LATENT if numbers[0] <= max(16, most)]
    elif op == "decode":
        work = case_work(case, limits)
        current = choose_decode_tile(request, work)
        others = [
            Tile(current.block_m, block_n, warps, stages) for block_n, stages, warps in _DECODE
        ]
    else:
        current = choose_prefill_tile(request)
        others = [
            Tile(*numbers) for numbers in _PREFILL if numbers[0] <= max(16, next_power_of_2(rows))
        ]
    fitting = (
        tile
        for tile in others
        if shared_bytes(
            tile,
            *sizes,
            *element_bytes,
            limits.products,
            latent=op == "latent",
            native_fp8=limits.has_fp8,
        )
        <= limits.shared_memory
    )
    return _distinct(vars(tile) for tile in (current, *fitting))


def _hopper_decode(
    case: BenchCase, sizes: tuple[int, int], limits: DeviceLimits
) -> Iterator[dict[str, Any]]:
    shape, stored = layer_shape(case.spec), case.spec.kv_format
    cache_bits, value_bits = stored.bits, case.spec.value_format.bits
    rows = case.batch.max_query_len * case.spec.group_size
    pairs = case.batch.num_reqs * case.spec.num_kv_heads
    one_warp = cache_bits < 16 and supports_one_warp(sizes, rows)
    yield vars(
        choose_hopper_decode_tile(
            *sizes,
            cache_bits=cache_bits,
            stored=shape.page_format,
            values=shape.value_format,
            rows=rows,
            keys_per_sm=case_work(case, limits),
            pairs_per_sm=-(-pairs // limits.num_sms),
            one_warp=one_warp,
            tuned=limits.tuned,
        )
    )
    widest = 128 if cache_bits == 16 or rows <= 32 else 64  # converted tiles are in registers, too
    tiles = [DecodeTile(block_n, stages) for block_n, stages in _HOPPER_DECODE]
    if stored.elements_per_group:  # CTAs of one warp only
        tiles = []
    elif cache_bits < 16 and rows <= 16:
        tiles += [DecodeTile(64, 2, 2), DecodeTile(64, 4, 2), DecodeTile(128, 2, 2)]
    if one_warp:
        warps = ((64, 2, 8), (32, 3, 12), (32, 3, 8), (64, 2, 6), (32, 4, 8))
        tiles += [DecodeTile(keys, stages, warps=count) for keys, stages, count in warps]
    for tile in tiles:
        if decode_shared_bytes(tile, *sizes, cache_bits, value_bits) <= SHARED_MEMORY and (
            tile.block_n <= (widest if max(sizes) <= 128 else 64)
        ):
            yield vars(tile)


def _hopper_prefill(
    case: BenchCase, sizes: tuple[int, int], limits: DeviceLimits
) -> Iterator[dict[str, Any]]:
    rows, window = case.batch.max_query_len * case.spec.group_size, case_window(case)
    cache_bytes = case.spec.kv_dtype.itemsize
    yield vars(
        choose_hopper_tile(
            *sizes,
            cache_bytes=cache_bytes,
            rows=rows,
            block_size=case.block_size,
            visible=window,
            tuned=limits.tuned,
        )
    )
    if cache_bytes == 1:
        yield from _hopper_float8_prefill(sizes)
        return
    for block_n in (128, 64) if visible_class(window)[1] is None else (64, 32, 128):
        for stages in (2, 3, 4):
            for persistent in (False, True):
                for q_stages in (2, 1) if persistent else (1,):
                    tile = HopperTile(block_n, stages, persistent=persistent, q_stages=q_stages)
                    if hopper_bytes(tile, *sizes) <= SHARED_MEMORY and (
                        max(sizes) <= 128 or block_n <= 64
                    ):
                        yield vars(tile)
                        if max(sizes) <= 64:  # small accumulators leave registers for a third one
                            yield vars(
                                dataclasses.replace(
                                    tile, consumers=3, consumer_registers=160, producer_registers=24
                                )
                            )


def _hopper_float8_prefill(sizes: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Tiles with converter warps: a warpgroup, or two warps in that of the loader warps."""
    for block_n in (128, 64) if max(sizes) <= 128 else (64,):
        for q_stages, byte_stages in ((1, 2), (2, 1), (1, 1), (2, 2)):
            for warps, registers, others in ((4, 56, 24), (2, 80, 80)):
                if warps == 4 and max(sizes) > 128:
                    continue  # 128 registers per thread at launch are too few for its WGMMAs
                tile = HopperTile(
                    block_n,
                    2,
                    persistent=True,
                    q_stages=q_stages,
                    consumer_registers=216,
                    producer_registers=others,
                    byte_stages=byte_stages,
                    converter_warps=warps,
                    converter_registers=registers,
                )
                if hopper_bytes(tile, *sizes) <= SHARED_MEMORY:
                    yield vars(tile)


def _distinct(tiles: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for tile in tiles:
        if tile not in found:
            found.append(dict(tile))
    return found
