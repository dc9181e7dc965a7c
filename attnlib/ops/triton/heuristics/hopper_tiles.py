"""Shapes of the Hopper prefill: chosen from the tables by a pure function, so that every entry can be compiled without the chip.

One CTA holds 128 or 192 rows of queries and two rings, of keys and of values; it takes the whole multiprocessor, because
two multiplying warpgroups of 232 registers (or three of 160) leave room for nothing else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.triton.heuristics.tile_table import Situation, TileTable, matching
from attnlib.ops.triton.hopper.support import DECODE_ROWS, decode_rows

__all__ = [
    "SHARED_MEMORY", "DecodeTile", "HopperTile", "choose_hopper_decode_tile", "choose_hopper_tile", "choose_section",
    "decode_shared_bytes", "padded_width", "shared_bytes",
]  # fmt: skip

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one CTA may have on SM90."""


L2_BYTES = 40 * 1024 * 1024
"""Bytes of the 50 MB L2 cache that hold keys and values; each half of the chip caches its own copy.
Not tuned: on an H200, sections of 1, 2 and 4 KV heads had nearly equal times on a prefill of 32k
tokens."""


@dataclass(frozen=True)
class HopperTile:
    """How one CTA works.

    Attributes:
        block_n: keys per step.
        stages: depth of the rings.
        staged_store: whether outputs pass through shared memory on their way out, for wide stores.
        persistent: one CTA per multiprocessor that walks the work items, instead of one CTA for each.
        sections: KV heads in groups that fit the L2 cache together (`choose_section`), instead of all beside each other.
        q_stages: tiles of queries that are held, 2 to load those of the next work item ahead.
        consumers: multiplying warpgroups of 64 rows each, 2 or 3.
        consumer_registers: per thread of a multiplying warpgroup.
        producer_registers: per thread of a loading warp.
    """

    block_n: int
    stages: int
    staged_store: bool = True
    persistent: bool = False
    sections: bool = True
    q_stages: int = 1
    consumers: int = 2
    consumer_registers: int = 232
    producer_registers: int = 40


@dataclass(frozen=True)
class DecodeTile:
    """How one decode CTA works.

    Attributes:
        block_n: keys per step.
        stages: depth of the rings. Deeper is not quicker: more than about 128 KB under way on each multiprocessor reads slower.
    """

    block_n: int
    stages: int


def padded_width(head_size: int) -> int:
    """The head size that shared memory holds: a power of two of at least 64; TMA fills the rest with zeros."""
    return max(64, 1 << (head_size - 1).bit_length())


def shared_bytes(tile: HopperTile, head_size: int, head_size_v: int) -> int:
    """Shared memory of one CTA in bytes, for 16-bit elements."""
    width, width_v = padded_width(head_size), padded_width(head_size_v)
    return (
        2
        * (
            tile.q_stages * 64 * tile.consumers * width
            + tile.stages * tile.block_n * (width + width_v)
        )
        + 1024
    )


def choose_section(num_kv_heads: int, max_seq_len: int, widths: int) -> int:
    """KV heads that are worked on side by side: as many as keep their keys and values of the longest request in L2.

    Args:
        num_kv_heads: Hkv.
        max_seq_len: upper bound of the sequence lengths.
        widths: padded head sizes of keys and values together.
    """
    section = num_kv_heads
    while section % 2 == 0 and section * max_seq_len * widths * 2 > L2_BYTES:
        section //= 2
    return section


def choose_hopper_tile(
    head_size: int,
    head_size_v: int,
    *,
    rows: int | None = None,
    block_size: int | None = None,
    visible: int | None = None,
    tuned: TileTable | None = None,
) -> HopperTile:
    """The tile for a pair of head sizes.

    Args:
        head_size: D.
        head_size_v: Dv.
        rows: query tokens times heads of the group that the longest request has, by an upper bound; None is many.
        block_size: N; None matches no entry that has a condition on it.
        visible: keys that one query sees at most, where a window or chunk says so; None is no bound, and matches entries without an upper end.
        tuned: the user's own table for the chip, asked before the shipped ones.

    Raises:
        UnsupportedConfigError: no tile fits the shared memory.
    """
    widest = max(padded_width(head_size), padded_width(head_size_v))
    many = 1 << 30 if rows is None else max(16, 1 << max(0, rows - 1).bit_length())
    now = Situation("hopper_prefill", "async", "16-bit", widest, many, None, block_size, visible)
    need = 0
    for entry in matching(now, tuned):
        tile = HopperTile(**dict(entry.tile))
        need = shared_bytes(tile, head_size, head_size_v)
        if need <= SHARED_MEMORY:
            return tile
    smallest = need or shared_bytes(HopperTile(64, 2), head_size, head_size_v)
    raise UnsupportedConfigError(
        f"head sizes {head_size} (keys) and {head_size_v} (values) need {smallest} bytes of shared memory with the "
        f"smallest tile, and Hopper has {SHARED_MEMORY}; use the plain Triton prefill",
        backend="triton",
    )


def decode_shared_bytes(tile: DecodeTile, head_size: int, head_size_v: int) -> int:
    """Shared memory of one decode CTA in bytes, for 16-bit elements and as many rows as it packs at most."""
    width, width_v = padded_width(head_size), padded_width(head_size_v)
    rows = decode_rows(head_size_v)
    return (
        2 * (rows * (width + tile.block_n) + tile.stages * tile.block_n * (width + width_v)) + 2048
    )


@functools.lru_cache(maxsize=64)
def choose_hopper_decode_tile(
    head_size: int,
    head_size_v: int,
    *,
    keys_per_sm: int | None = None,
    tuned: TileTable | None = None,
) -> DecodeTile:
    """The decode tile for a pair of head sizes; other arguments and errors as in `choose_hopper_tile`.

    Args:
        head_size: D.
        head_size_v: Dv.
        keys_per_sm: class of work (`tile_tables.work_class`); None matches no entry that has a condition on it.
        tuned: the user's own table for the chip.
    """
    widest = max(padded_width(head_size), padded_width(head_size_v))
    need = 0
    for entry in matching(
        Situation("hopper_decode", "async", "16-bit", widest, DECODE_ROWS, keys_per_sm), tuned
    ):
        tile = DecodeTile(**dict(entry.tile))
        need = decode_shared_bytes(tile, head_size, head_size_v)
        if need <= SHARED_MEMORY:
            return tile
    raise UnsupportedConfigError(
        f"head sizes {head_size} (keys) and {head_size_v} (values) need {need} bytes of shared memory with the smallest "
        f"decode tile, and Hopper has {SHARED_MEMORY}; use the plain Triton decode",
        backend="triton",
    )
