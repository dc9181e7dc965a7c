"""Tiles of the kernels over the packed cache: a pure function of sizes and shared memory."""

from __future__ import annotations

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.triton.heuristics.tiles import Tile, next_power_of_2, split_head_size

__all__ = ["packed_shared_bytes", "packed_tile"]


def packed_shared_bytes(tile: Tile, head_size: int, query_bytes: int, cache_bytes: int) -> int:
    """Return an upper estimate of the shared memory of one program, in bytes.

    The pipeline holds `num_stages` tiles of keys and of values. One tile, the queries and the
    weights are exchanged between threads.
    """
    width = sum(split_head_size(head_size))
    ring = tile.num_stages * tile.block_n * 2 * width * cache_bytes
    exchanged = tile.block_n * width * query_bytes
    rows = tile.block_m * (width + tile.block_n) * query_bytes
    return max(ring + exchanged + rows, tile.block_m * width * 4) + 2048


def packed_tile(
    head_size: int, query_bytes: int, cache_bytes: int, max_rows: int, shared_memory: int
) -> Tile:
    """Return a tile that fits: 16 to 64 rows, 64 keys or fewer.

    Args:
        head_size: D.
        query_bytes: bytes per element of the products' operands (4 for float32).
        cache_bytes: bytes per element of the cache.
        max_rows: query heads per KV head times query tokens of the longest request.
        shared_memory: limit per program in bytes.

    Raises:
        UnsupportedConfigError: even the smallest tile does not fit.
    """
    wide = sum(split_head_size(head_size)) * query_bytes > 256
    # With two chunks, fewer rows than Hopper's asynchronous products need: see `head_chunks`.
    most_rows = 16 if wide else 32 if split_head_size(head_size)[1] else 64
    rows = min(most_rows, max(16, next_power_of_2(max_rows)))
    if rows == 16 and query_bytes == 2 and not wide:
        # The fastest of eight tiles on an H200, in four of six decodes of bfloat16 with 32/8 heads
        # of size 128 (results/h200/packed_decode_tiles.json). One warp needs no barriers.
        tile = Tile(16, 16, 1, 4)
        if packed_shared_bytes(tile, head_size, query_bytes, cache_bytes) <= shared_memory:
            return tile
    # Larger tiles of wide or float32 rows spill registers.
    most = 64 // (1 + wide) // (1 + (query_bytes == 4))
    for block_n in (size for size in (64, 32, 16) if size <= most):
        for stages in (3, 2, 1):
            tile = Tile(rows, block_n, 8 if query_bytes == 4 else 4, stages)
            need = packed_shared_bytes(tile, head_size, query_bytes, cache_bytes)
            if need <= shared_memory:
                return tile
    raise UnsupportedConfigError(
        f"head size {head_size} at {query_bytes} bytes needs {need} bytes of shared memory with "
        f"the smallest tile, and the chip allows {shared_memory}; use a 16-bit dtype",
        backend="triton",
    )
