"""Choice of the portable kernels' tiles: pure functions of tables, which can be tested without the
chip.

A tile is chosen from the tables (`tile_table`) and the limits of the chip, never by timing at run
time. It depends on upper bounds alone, so that it never changes after a CUDA graph is captured or a
process is warmed up. The compile tests compare the register spills of each tile with its table
entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.triton.heuristics.tile_table import TileProblem, TileTable, matching
from attnlib.ops.triton.heuristics.tiles import (
    Tile,
    next_power_of_2,
    shared_bytes,
    split_head_size,
)

__all__ = ["TileRequest", "choose_decode_tile", "choose_latent_tile", "choose_prefill_tile"]


class TileRequest(NamedTuple):
    """What a tile is chosen for.

    Attributes:
        head_sizes: (D, Dv).
        element_bytes: bytes per element of the products' operands (4 for float32), and of the
            cache.
        rows: query tokens times heads per group of the longest request.
        shared_memory: limit per program in bytes.
        products: matrix instructions of the chip: "async", "sync" or "mfma".
        score_tiles: of `shared_bytes`.
        native_fp8: whether the chip converts float8 in hardware.
        tuned: the user's table for the chip, which precedes the shipped ones.
    """

    head_sizes: tuple[int, int]
    element_bytes: tuple[int, int]
    rows: int
    shared_memory: int
    products: str
    score_tiles: int = 0
    native_fp8: bool = True
    tuned: TileTable | None = None


def _fallbacks(block_m: int, num_warps: int) -> Iterator[Tile]:
    """Yield smaller and smaller tiles, for chips and head sizes that no table entry fits."""
    while block_m >= 16:
        for block_n in (64, 32, 16):
            for stages in (2, 1):
                yield Tile(block_m, block_n, num_warps, stages)
        block_m //= 2


def _narrowed(tile: Tile, rows: int) -> Tile:
    """Return the tile with fewer rows than the table's."""
    if rows >= tile.block_m:
        return tile
    warps = max(4, tile.num_warps * rows // tile.block_m) if tile.num_warps > 4 else tile.num_warps
    return replace(
        tile,
        block_m=rows,
        num_warps=warps,
        block_n=tile.block_n if rows >= 64 else min(64, tile.block_n),
    )


def _widened(tile: Tile, rows: int) -> Tile:
    """Return the tile with more rows than the table's."""
    if rows <= tile.block_m:
        return tile
    return replace(
        tile,
        block_m=rows,
        num_warps=max(tile.num_warps, 8 if rows >= 64 and tile.block_n < 64 else 4),
    )


def _first_that_fits(
    tiles: Iterable[Tile], request: TileRequest, latent: bool = False, has_score: bool = False
) -> Tile:
    need, sizes, element_bytes = 0, request.head_sizes, request.element_bytes
    for tile in tiles:
        need = shared_bytes(
            tile,
            *sizes,
            *element_bytes,
            request.products,
            request.score_tiles,
            latent=latent,
            native_fp8=request.native_fp8,
            has_score=has_score,
        )
        if need <= request.shared_memory:
            return tile
    raise UnsupportedConfigError(
        f"head sizes {sizes[0]} (keys) and {sizes[1]} (values) at {element_bytes[0]} bytes need "
        f"{need} bytes of shared memory with the smallest tile, and the chip allows "
        f"{request.shared_memory}; use a "
        "16-bit dtype or the torch backend",
        backend="triton",
    )


def _tiles_of_tables(
    op: str, request: TileRequest, rows: int, keys_per_sm: int | None = None
) -> list[Tile]:
    """Return the tables' tiles for these sizes, best first."""
    sizes, products = request.head_sizes, request.products
    query_bytes, cache_bytes = request.element_bytes
    width = max(sum(split_head_size(sizes[0])), sum(split_head_size(sizes[1])))
    if op == "latent":
        width = next_power_of_2(sizes[1])
    elif op == "prefill" and products == "async" and query_bytes < 4:
        width = next_power_of_2(max(sizes))  # one chunk, see `head_chunks`
    elements = (
        "float32"
        if query_bytes == 4
        else "16-bit"
        if cache_bytes > 1
        else "fp8"
        if request.native_fp8
        else "fp8-bytes"
    )
    rows = max(16, next_power_of_2(rows))
    problem = TileProblem(op, products, elements, width, rows, keys_per_sm)
    return [Tile(**dict(entry.tile)) for entry in matching(problem, request.tuned)]


def choose_prefill_tile(request: TileRequest, lookups: int = 0, has_score: bool = False) -> Tile:
    """Return the tile of a prefill.

    It has as many rows as the table's tile for the head size, or fewer if the batch has fewer.

    Args:
        request: the layer, the rows and the chip.
        lookups: how many of its score tiles are lookups of a score function. Their addresses and
            values take registers: with 64 scores per thread, a kernel for sm_80 used 488 bytes of
            local memory per thread. Tiles with lookups have at most 32. With one stage and 64 keys,
            a kernel for sm_89 used 424 bytes.
        has_score: there is a score function (`shared_bytes`).

    Raises:
        UnsupportedConfigError: even the smallest tile does not fit.
    """
    best = _tiles_of_tables("prefill", request, request.rows)
    rows = max(16, next_power_of_2(request.rows))
    tiles = [_narrowed(tile, min(tile.block_m, rows)) for tile in best]
    candidates = [*tiles, *_fallbacks(tiles[0].block_m, tiles[0].num_warps)]
    if lookups:
        candidates = [tile for tile in candidates if _has_room_for_lookups(tile)]
    return _first_that_fits(candidates, request, has_score=has_score)


def _has_room_for_lookups(tile: Tile) -> bool:
    few_scores = tile.block_m * tile.block_n <= 1024 * tile.num_warps
    return few_scores and (tile.num_stages > 1 or tile.block_n <= 32)


def choose_decode_tile(request: TileRequest, keys_per_sm: int | None = None) -> Tile:
    """Return the tile of a decode: as few rows (16 to 64) as hold the group's heads and tokens.

    Args:
        request: the layer, the rows and the chip.
        keys_per_sm: `tile_table.work_class`. None if the bits of a row must not depend on other
            requests; the tile is then the one for any amount of work.

    Raises:
        UnsupportedConfigError: even the smallest tile does not fit.
    """
    best = _tiles_of_tables("decode", request, request.rows, keys_per_sm)
    width = max(sum(split_head_size(size)) for size in request.head_sizes)
    most = 64 if width <= 256 and request.element_bytes[0] < 4 else 16
    rows = min(most, max(16, next_power_of_2(request.rows)))
    tiles = [_widened(tile, rows) for tile in best]
    return _first_that_fits([*tiles, *_fallbacks(rows, tiles[0].num_warps)], request)


def choose_latent_tile(request: TileRequest, in_place: bool = True) -> Tile:
    """Return the tile of a decode or prefill over latents, whose values are a prefix of the keys.

    Args:
        request: the layer, the rows and the chip.
        in_place: whether asynchronous products may read the keys where they were loaded
            (`latents_in_place`). Elsewhere tiles have fewer rows than such products need.

    Raises:
        UnsupportedConfigError: even the smallest tile does not fit.
    """
    most = 32 if request.products == "async" and not in_place else 64
    rows = min(most, max(16, next_power_of_2(request.rows)))
    tiles = [tile for tile in _tiles_of_tables("latent", request, rows) if tile.block_m <= rows]
    return _first_that_fits([*tiles, *_fallbacks(min(rows, 16), 4)], request, latent=True)
