"""Tiles of the Hopper prefills, chosen from the tables by pure functions.

One prefill CTA holds 128 or 192 rows of queries, a ring of keys and a ring of values. It uses a
whole multiprocessor: two consumer warpgroups with 232 registers per thread, or three with 160,
leave too few registers for another CTA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.triton.heuristics.tile_table import TileProblem, TileTable, matching
from attnlib.ops.triton.hopper.sizes import gathers

__all__ = [
    "SHARED_MEMORY",
    "HopperTile",
    "choose_hopper_tile",
    "choose_l2_heads",
    "is_long",
    "key_parts",
    "key_width",
    "padded_width",
    "shared_bytes",
    "with_sign_softmax",
    "with_query_registers",
    "with_short_ranges",
]

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one CTA can use on SM90."""

_GATHER_REGISTERS = (224, 64)
"""Registers per thread of a consumer and of the warpgroup that gathers the rows of small blocks."""

L2_BYTES = 40 * 1024 * 1024
"""Bytes of the 50 MB L2 cache that hold keys and values; each half of the chip caches its own copy.
Not tuned: on an H200, groups of 1, 2 and 4 KV heads had nearly equal times on a prefill of 32k
tokens."""


SHORT_CONTEXT = 12288
"""Keys of the longest request up to which a prefill computes the maxima of every tile. Signs are
faster at all lengths, but batch-invariant prefills compute maxima, and are to take at most 1.15 of
the time: with signs 1.18 for 8k keys, 1.13 to 1.15 for 16k, and 1.11 to 1.15 for 32k (H200, blocks
of 128). `with_sign_softmax` has the exception."""


@dataclass(frozen=True)
class HopperTile:
    """Parameters of a prefill CTA.

    Attributes:
        block_n: keys per step.
        stages: depth of the rings.
        staged_store: stage outputs in shared memory, for wide stores.
        persistent: one CTA per multiprocessor, which takes several work items, instead of one CTA
            per work item.
        l2_groups: order work tiles by groups of KV heads that fit in the L2 cache together
            (`choose_l2_heads`), instead of all heads adjacent.
        q_stages: query tiles in shared memory; 2 loads those of the next work item ahead.
        consumers: consumer warpgroups of 64 rows each, 2 or 3; 1 in the batch-invariant kernel.
        consumer_registers: registers per thread of a consumer warpgroup.
        producer_registers: registers per thread of a loader warp.
        byte_stages: depth of the rings of a float8 cache, from which converter warps fill the rings
            of the products; 0 with 16-bit caches.
        converter_warps: 4, a warpgroup, or 2, which share one with the loader warps.
        converter_registers: registers per thread of a converter warp; those of a loader warp in a
            shared warpgroup.
        query_registers: keep queries in registers, over a float8 cache or with two accumulators.
        sign_softmax: look for rising maxima by signs (`with_sign_softmax`).
        ctas_per_sm: persistent CTAs of a multiprocessor, which share its registers.
        two_accumulators: values in parts have two accumulators (`kernels/two_accumulators.py`).
    """

    block_n: int
    stages: int
    staged_store: bool = True
    persistent: bool = False
    l2_groups: bool = True
    q_stages: int = 1
    consumers: int = 2
    consumer_registers: int = 232
    producer_registers: int = 40
    byte_stages: int = 0
    converter_warps: int = 4
    converter_registers: int = 0
    query_registers: bool = False
    sign_softmax: bool = False
    ctas_per_sm: int = 1
    two_accumulators: bool = False


def padded_width(head_size: int) -> int:
    """Return the head size in shared memory: a power of two, at least 64; TMA pads with zeros."""
    return max(64, 1 << (head_size - 1).bit_length())


def key_parts(head_size: int, cache_bytes: int = 2) -> int:
    """Return in how many parts of 64 elements a prefill keeps queries and keys; 1 is undivided.

    Tiles have powers of two as sizes. Heads of 129 to 192 elements (192 in the expanded form of
    multi-head latent attention) take three parts instead of 256 elements, which saves a quarter of
    the products and of the shared memory. Tiles that are converted from float8 are undivided.
    """
    return 3 if cache_bytes == 2 and 128 < head_size <= 192 else 1


def widest_part(head_size: int, head_size_v: int, cache_bytes: int, block_size: int | None) -> int:
    """Return the larger width of keys and values, for which a prefill tile is chosen. Values of 129
    to 192 elements are in parts where keys are."""
    if key_parts(head_size, cache_bytes) == key_parts(head_size_v) == 3:
        return 256 if gathers(block_size or 0) else 192
    return max(key_width(head_size, cache_bytes), padded_width(head_size_v))


def key_width(head_size: int, cache_bytes: int = 2) -> int:
    """Return the elements of a query or key in the shared memory of a prefill."""
    return 192 if key_parts(head_size, cache_bytes) > 1 else padded_width(head_size)


def shared_bytes(
    tile: HopperTile, head_size: int, head_size_v: int, has_score: bool = False
) -> int:
    """Return the shared memory of one prefill CTA in bytes, for 16-bit queries.

    A score function over a 16-bit cache may need 16 elements for each key of a tile
    (`softmax.column_numbers`).
    """
    width = key_width(head_size, 1 if tile.byte_stages else 2)
    width_v = padded_width(head_size_v)
    if tile.block_n == 128 and not tile.byte_stages:
        # Values in parts of 32 elements, and a part of ones (`kernels/value_columns.py`).
        width_v = max(width_v, min(128, 32 * (-(-head_size_v // 32) + 1)))
    blocks = tile.consumers if max(width, width_v) <= 256 else 1
    queries = 2 * tile.q_stages * 64 * blocks * width
    ring = (2 * tile.stages + tile.byte_stages) * tile.block_n * (width + width_v)
    numbers = 32 * tile.block_n if has_score and not tile.byte_stages else 0
    # Three consumers with divided queries exchange outputs within their warps, as two accumulators.
    exchanges = key_parts(head_size) > 1 and (tile.consumers == 3 or tile.two_accumulators)
    exchange = 2048 * tile.consumers if exchanges else 0
    return queries + ring + numbers + exchange + 1024


def with_query_registers(tile: HopperTile) -> HopperTile:
    """Return a prefill tile over a float8 cache with its queries in registers, where its converter
    is a warpgroup that can give registers away; other tiles as they are."""
    if not tile.byte_stages or tile.converter_warps != 4 or tile.consumers != 2:
        return tile
    # 65536 registers of a multiprocessor, with the loaders' warpgroup.
    return replace(tile, query_registers=True, consumer_registers=224, converter_registers=40)


def with_short_ranges(tile: HopperTile) -> HopperTile:
    """Return a prefill tile for queries that see short ranges of keys: half as many keys per step.

    Fewer keys of the first and last step of a range are masked, and a work item ends earlier after
    its last product. Tiles over a float8 cache stay as they are.
    """
    if tile.block_n != 128 or tile.byte_stages:
        return tile
    return replace(tile, block_n=64, stages=2 * tile.stages)


def is_long(max_seq_len: int) -> bool:
    """Return whether prefills of requests of up to `max_seq_len` keys look for rising maxima by
    signs instead of computing maxima (`softmax_by_sign`)."""
    return max_seq_len > SHORT_CONTEXT


def with_sign_softmax(tile: HopperTile, max_seq_len: int, head_size: int) -> HopperTile:
    """Return a prefill tile for requests of up to `max_seq_len` keys.

    Keys in parts (head size 192) use signs at all lengths: 8k tokens of multi-head latent attention
    take 4110 instead of 4330 us (H200).
    """
    is_by_sign = is_long(max_seq_len) or key_parts(head_size) > 1
    return replace(tile, sign_softmax=True) if is_by_sign else tile


def choose_l2_heads(num_kv_heads: int, max_seq_len: int, widths: int) -> int:
    """Return how many KV heads a prefill works on at a time.

    As many heads as have their keys and values of the longest request in L2 together.

    Args:
        num_kv_heads: Hkv.
        max_seq_len: upper bound of the sequence lengths.
        widths: sum of the padded head sizes of keys and values.
    """
    heads = num_kv_heads
    while heads % 2 == 0 and heads * max_seq_len * widths * 2 > L2_BYTES:
        heads //= 2
    return heads


def choose_hopper_tile(
    head_size: int,
    head_size_v: int,
    *,
    cache_bytes: int = 2,
    rows: int | None = None,
    block_size: int | None = None,
    visible: int | None = None,
    has_score: bool = False,
    tuned: TileTable | None = None,
) -> HopperTile:
    """Return the prefill tile for a pair of head sizes.

    Args:
        head_size: D.
        head_size_v: Dv.
        cache_bytes: size of an element of the cache, 1 (float8) or 2.
        rows: query tokens times heads per group of the longest request, an upper bound; None is
            unbounded.
        block_size: N; None matches no entry with a condition on it.
        visible: keys visible to one query, at most, by a window or chunk; None is unbounded.
        has_score: there is a score function. Tiles with three consumer warpgroups leave too few
            registers for it: with head size 64, their loops over keys spilled, and were slower.
        tuned: the user's table for the chip, which precedes the shipped ones.

    Raises:
        UnsupportedConfigError: no tile fits in shared memory.
    """
    widest = widest_part(head_size, head_size_v, cache_bytes, block_size)
    many = 1 << 30 if rows is None else max(16, 1 << max(0, rows - 1).bit_length())
    elements = "16-bit" if cache_bytes == 2 else "fp8"
    gathered = gathers(block_size or 0)
    problem = TileProblem(
        "hopper_prefill", "async", elements, widest, many, None, block_size, visible
    )
    need = 0
    for entry in matching(problem, tuned):
        tile = HopperTile(**dict(entry.tile))
        if tile.consumers > 2 and (has_score or gathered or widest < padded_width(head_size_v)):
            continue
        if gathered:
            consumer, producer = _GATHER_REGISTERS
            tile = replace(tile, consumer_registers=consumer, producer_registers=producer)
        need = shared_bytes(tile, head_size, head_size_v, has_score)
        if need <= SHARED_MEMORY:
            return tile
    smallest = need or shared_bytes(HopperTile(64, 2), head_size, head_size_v)
    raise UnsupportedConfigError(
        f"head sizes {head_size} (keys) and {head_size_v} (values) need {smallest} bytes of shared "
        f"memory with the smallest tile, and Hopper has {SHARED_MEMORY}; use the portable prefill",
        backend="triton",
    )
