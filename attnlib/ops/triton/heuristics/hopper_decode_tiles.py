"""Tiles of the Hopper decodes, chosen from the tables by pure functions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attnlib.errors import UnsupportedConfigError
from attnlib.kv_formats import KVFormat
from attnlib.ops.triton.heuristics.hopper_tiles import SHARED_MEMORY, padded_width
from attnlib.ops.triton.heuristics.tile_table import (
    TileProblem,
    TileTable,
    matching,
    page_elements,
)
from attnlib.ops.triton.hopper.sizes import DECODE_ROWS, WARP_ROWS, decode_rows

__all__ = [
    "MAX_CONSUMERS",
    "MAX_WARPS",
    "DecodeTile",
    "choose_hopper_decode_tile",
    "decode_shared_bytes",
    "supports_one_warp",
]

MAX_CONSUMERS = 2
"""Consumer warpgroups of a decode CTA, at most."""

MAX_WARPS = 16
"""CTAs of one warp on a multiprocessor, at most; a thread has 128 registers then."""


@dataclass(frozen=True)
class DecodeTile:
    """Parameters of a decode CTA.

    Attributes:
        block_n: keys per step.
        stages: depth of the rings. More than about 128 KB in flight per multiprocessor reduce the
            memory throughput.
        consumers: consumer warpgroups, 1 or 2, each with rings and splits of its own. Two hide the
            latency of converting float8 tiles.
        warps: CTAs of one warp on each multiprocessor (`kernels/warp_decode.py`); 0 for CTAs with
            consumer warpgroups.
        spare: stages of memory that CTAs of one warp leave empty, so that no more than `warps` fit
            beside each other: a next launch that begins early would divide its CTAs unevenly.
    """

    block_n: int
    stages: int
    consumers: int = 1
    warps: int = 0
    spare: int = 0


def decode_shared_bytes(
    tile: DecodeTile,
    head_size: int,
    head_size_v: int,
    cache_bits: int = 16,
    value_bits: int | None = None,
) -> int:
    """Return the shared memory of a decode CTA in bytes, for 16-bit queries and the most rows, or
    of all CTAs of a multiprocessor where they have one warp.

    `cache_bits` is the size of an element of the cache: 4, 8 or 16, `value_bits` that of the values
    where it is another one. (The decode over 4-bit integers stores four times the weights of a
    quarter of the rows.) Pages of elements of less than 16 bits may hold scales, of at most 8 bytes
    for a key and for a value.
    """
    width, width_v = padded_width(head_size), padded_width(head_size_v)
    rows = decode_rows(head_size_v)
    bits = cache_bits * width + (value_bits or cache_bits) * width_v
    ring = (tile.stages + tile.spare) * tile.block_n * bits // 8
    if cache_bits < 16:
        ring += 2 * 8 * tile.stages * tile.block_n
    if tile.warps:
        # Each CTA has barriers and 1 KB that the driver uses.
        return tile.warps * (ring + 1152)
    return tile.consumers * (2 * rows * (width + tile.block_n) + ring) + 2048


def supports_one_warp(head_sizes: tuple[int, int], rows: int) -> bool:
    """Return whether CTAs of one warp support a decode over a quantized cache with these head
    sizes and query rows per KV head: heads that fill tiles, and few rows."""
    return rows <= WARP_ROWS and all(size in (64, 128) for size in head_sizes)


@functools.lru_cache(maxsize=64)
def choose_hopper_decode_tile(
    head_size: int,
    head_size_v: int,
    *,
    cache_bits: int = 16,
    stored: KVFormat | None = None,
    values: KVFormat | None = None,
    rows: int = DECODE_ROWS,
    keys_per_sm: int | None = None,
    pairs_per_sm: int | None = None,
    one_warp: bool = False,
    tuned: TileTable | None = None,
) -> DecodeTile:
    """Return the decode tile for a pair of head sizes.

    Args:
        head_size: D.
        head_size_v: Dv.
        cache_bits: size of an element of a cache whose pages hold no scales: 8 or 16.
        stored: the format of pages that hold their scales (M16); of the keys, if `values` is given.
        values: the format of the values, where it is not that of the keys.
        rows: query heads of a group times query tokens, an upper bound.
        keys_per_sm: `tile_table.work_class`; None matches no entry with a condition on it.
        pairs_per_sm: (request, KV head) pairs per multiprocessor, rounded up; None matches no
            entry with a condition on it.
        one_warp: whether CTAs of one warp may serve the calls (`supports_one_warp`).
        tuned: the user's table for the chip, which precedes the shipped ones.

    Raises:
        UnsupportedConfigError: no tile fits in shared memory.
    """
    widest = max(padded_width(head_size), padded_width(head_size_v))
    cache_bits = cache_bits if stored is None else stored.bits
    if cache_bits == 16:
        # Tiles of 80, 96 and 112 elements differ from those of 128.
        widest = max(64, head_size, head_size_v)
    only_warps = stored is not None and stored.elements_per_group > 0  # keys of 4-bit floats
    need = 0
    many = max(16, 1 << (rows - 1).bit_length())
    elements = "16-bit" if cache_bits == 16 else "fp8"
    if stored is not None:
        elements = page_elements(stored, values)
    value_bits = cache_bits if values is None else values.bits
    problem = TileProblem(
        "hopper_decode", "async", elements, widest, many, keys_per_sm, pairs_per_sm=pairs_per_sm
    )
    for entry in matching(problem, tuned):
        tile = DecodeTile(**dict(entry.tile))
        if only_warps > bool(tile.warps) or (tile.warps and not one_warp):
            continue
        need = decode_shared_bytes(tile, head_size, head_size_v, cache_bits, value_bits)
        if need <= SHARED_MEMORY:
            return tile
    raise UnsupportedConfigError(
        f"head sizes {head_size} (keys) and {head_size_v} (values) need {need} bytes of shared "
        f"memory with the smallest decode tile, and Hopper has {SHARED_MEMORY}; use the portable "
        "decode",
        backend="triton",
    )
