"""Tiles of the kernels over pages that hold their scales (M16)."""

from __future__ import annotations

from dataclasses import replace

from attnlib.kv_dtype import KVFormat
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.tiles import Tile, next_power_of_2
from attnlib.ops.triton.kernels.number_tables import NUMBER_TABLE_BYTES
from attnlib.ops.triton.launch.number_code import is_looked_up

__all__ = [
    "choose_page_decode_tile",
    "choose_page_prefill_tile",
    "page_ctas_per_sm",
    "page_shared_bytes",
]

_WARPS_PER_SM = 16
"""Warps that hide the latency of each other's conversions."""

_RESERVED = 8 * 1024
"""Bytes of shared memory for reductions and conversions between layouts."""


def page_shared_bytes(
    tile: Tile,
    stored: KVFormat,
    head_size: int,
    head_size_v: int,
    query_bytes: int,
    products: str,
    values: KVFormat | None = None,
) -> int:
    """Shared memory of a CTA: stages of keys and values with their scales, and the weights.

    Args:
        query_bytes: bytes of an element of the queries. Elements of float32 products, and
            those that are multiplied by their scales, pass through shared memory.
        products: `DeviceLimits.products`. Asynchronous products of 64 rows and more read queries
            and converted elements from shared memory, too; others exchange converted keys, then
            values, between warps there, and mma.sync reads as many queries from there.
        values: the format of the values, where `stored` is that of the keys only.
    """
    per_key, values = 0, values or stored
    for one, size in ((stored, head_size), (values, head_size_v)):
        scales = one.bytes_per_head(size) - one.stored_size(size) * one.dtype.itemsize
        per_key += max(32, next_power_of_2(one.stored_size(size))) + scales
    elements = next_power_of_2(head_size) + next_power_of_2(head_size_v)
    from_shared = products == "async" and tile.block_m >= 64
    extra = 0
    if from_shared:
        extra = 2 * (tile.block_n + tile.block_m) * elements
    elif stored.elements_per_group or values.elements_per_group:
        extra = 2 * tile.block_n * elements
    elif tile.block_m >= 64:
        extra = 2 * tile.block_n * max(map(next_power_of_2, (head_size, head_size_v)))
    if products == "sync" and tile.block_m >= 64:
        extra += 2 * tile.block_m * next_power_of_2(head_size)
    if query_bytes == 4:
        extra = 4 * tile.block_n * elements
    looked_up = any(is_looked_up(one.number, one.bits) for one in (stored, values))
    if looked_up and query_bytes == 2 and products != "mfma":
        extra += NUMBER_TABLE_BYTES
    weights = query_bytes * tile.block_m * tile.block_n
    return tile.num_stages * tile.block_n * per_key + extra + weights + _RESERVED


def page_ctas_per_sm(tile: Tile) -> int:
    """Resident CTAs per multiprocessor that splits are computed for."""
    return max(1, _WARPS_PER_SM // tile.num_warps)


def choose_page_decode_tile(
    rows: int,
    stored: KVFormat,
    head_size: int,
    head_size_v: int,
    query_bytes: int,
    limits: DeviceLimits,
    values: KVFormat | None = None,
) -> Tile:
    """The tile of a decode.

    Args:
        rows: query heads per KV head times the longest query of the batch.
        query_bytes: bytes of an element of the queries.
        values: as in `page_shared_bytes`.
    """
    block_m = min(64, max(16, next_power_of_2(rows)))
    tile = Tile(block_m, 64, 4, 4) if query_bytes == 2 else Tile(block_m, 32, 4, 2)
    if limits.products == "mfma":
        tile = Tile(block_m, 32, 4, 2)  # with more keys, the registers of 4 warps spill
    return _fit(tile, stored, head_size, head_size_v, query_bytes, limits, values)


def choose_page_prefill_tile(
    rows: int,
    stored: KVFormat,
    head_size: int,
    head_size_v: int,
    query_bytes: int,
    limits: DeviceLimits,
    values: KVFormat | None = None,
) -> Tile:
    """The tile of a prefill.

    Args:
        rows: query heads per KV head times the longest query of the batch.
        query_bytes: bytes of an element of the queries.
    """
    largest = 128 if max(head_size, head_size_v) <= 128 else 64
    if limits.products == "mfma" and 4 in (stored.bits, (values or stored).bits):
        largest = 64  # with 128 rows, unpacked elements in two layouts spill
    block_m = min(largest, max(16, next_power_of_2(rows)))
    tile = Tile(block_m, 32, 8 if block_m == 128 else 4, 2)
    return _fit(tile, stored, head_size, head_size_v, query_bytes, limits, values)


def _fit(
    tile: Tile,
    stored: KVFormat,
    head_size: int,
    head_size_v: int,
    query_bytes: int,
    limits: DeviceLimits,
    values: KVFormat | None = None,
) -> Tile:
    """The tile with as many stages, then rows, then keys as the shared memory of a CTA holds."""
    sizes = (stored, head_size, head_size_v, query_bytes, limits.products, values)
    while page_shared_bytes(tile, *sizes) > limits.shared_memory:
        if tile.num_stages > 1:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_m > 32:
            tile = replace(tile, block_m=tile.block_m // 2, num_warps=4)
        elif tile.block_n > 16:
            tile = replace(tile, block_n=tile.block_n // 2)
        else:
            break
    return tile
