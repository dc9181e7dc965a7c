"""Tiles of the portable kernels: pure functions of tables, which can be tested without the chip.

A tile is chosen from the tables (`tile_table`) and the limits of the chip, never by timing at run
time. It depends on upper bounds alone, so that it never changes after a CUDA graph is captured or a
process is warmed up. `shared_bytes` is an upper estimate of the shared memory that the compiler
allocates. The compile tests compare it with the compiler's number, and the register spills of each
tile with its table entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.triton.heuristics.tile_table import TileProblem, TileTable, matching

__all__ = [
    "Tile",
    "choose_decode_tile",
    "choose_latent_tile",
    "choose_prefill_tile",
    "next_power_of_2",
    "shared_bytes",
    "split_head_size",
    "head_chunks",
    "key_chunks",
    "latents_in_place",
]


@dataclass(frozen=True)
class Tile:
    """Parameters of one program.

    Attributes:
        block_m: rows; a row is one query head of one query token.
        block_n: keys per step.
        num_warps: warps per program.
        num_stages: depth of the software pipeline over keys.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, int | bool]:
        """The compile-time arguments and options of a kernel with this tile."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def split_head_size(size: int) -> tuple[int, int]:
    """Return a head size as one or two powers of two: (chunk, 0), or two chunks with less padding.

    96 is 64 + 32 and 192 is 128 + 64, without padding. 112 as 64 + 64 saves nothing over 128, so it
    stays one chunk. The first chunk has at least 16 elements and a second one at least 32: with
    fewer, all four warps of a decode compute the same products.
    """
    whole = max(16, next_power_of_2(size))
    large = whole // 2
    if whole == size or large < 16:
        return whole, 0
    small = max(32, next_power_of_2(size - large))
    return (large, small) if large + small < whole else (whole, 0)


def _uses_wgmma(tile: Tile, query_bytes: int, products: str) -> bool:
    """Whether products are Hopper's asynchronous ones, over keys and values in shared memory."""
    return products == "async" and tile.block_m >= 64 and query_bytes < 4


def head_chunks(
    sizes: tuple[int, int], tile: Tile, query_bytes: int, products: str
) -> tuple[int, int, int, int]:
    """Return the head sizes of keys and values, each as one or two powers of two: (D0, D1, DV0,
    DV1) of a kernel with this tile.

    With asynchronous products each is one chunk, and both have rows of equal swizzle width (128
    bytes from 64 elements on). The shared memory descriptors of all products of the kernel then
    have the same upper word. Where the words differ, ptxas 12.8, which Triton 3.6 uses, computes
    descriptors from registers that do not hold their base address: wrong results and illegal
    addresses, on Hopper, where tiles reach shared memory through registers (float8, unaligned
    rows). ptxas 12.9 compiles the same PTX correctly.
    """
    if _uses_wgmma(tile, query_bytes, products):
        widths = [max(16, next_power_of_2(size)) for size in sizes]
        swizzled = min(64, max(widths))
        return max(widths[0], swizzled), 0, max(widths[1], swizzled), 0
    return *split_head_size(sizes[0]), *split_head_size(sizes[1])


def key_chunks(
    sizes: tuple[int, int], tile: Tile, query_bytes: int, products: str, latent: bool = False
) -> dict[str, int]:
    """Return the chunks of keys and values as compile-time arguments of a kernel with this tile.

    Args:
        sizes: (D, Dv).
        tile: the tile.
        query_bytes: bytes per element of the products' operands.
        products: matrix instructions of the chip: "async", "sync" or "mfma".
        latent: the values are a prefix of the keys, whose chunks are then the values and the rest.
    """
    if latent:
        rest = sizes[0] - sizes[1]
        # Chunks of one swizzle width for asynchronous products, as in `head_chunks`.
        least = (64, 64) if _uses_wgmma(tile, query_bytes, products) else (16, 32)
        first = max(least[0], next_power_of_2(sizes[1]))
        second = max(least[1], next_power_of_2(rest)) if rest else 0
        return {"D0": first, "D1": second, "DV0": first, "DV1": 0}
    chunks = head_chunks(sizes, tile, query_bytes, products)
    return dict(zip(("D0", "D1", "DV0", "DV1"), chunks, strict=True))


def shared_bytes(
    tile: Tile,
    head_size: int,
    head_size_v: int,
    query_bytes: int,
    cache_bytes: int,
    products: str,
    score_tiles: int = 0,
    latent: bool = False,
    native_fp8: bool = True,
    has_score: bool = False,
) -> int:
    """Return an upper estimate of the shared memory of one program, in bytes.

    The pipeline holds num_stages - 1 tiles of keys and of values, and one more if asynchronous
    matrix instructions read them in place. Queries and weights are in shared memory too, unless the
    instructions take them from registers (weights with "async", queries with "mfma"), and so is one
    tile converted from float8.

    Args:
        tile: the tile.
        head_size: D, of queries and keys.
        head_size_v: Dv.
        query_bytes: bytes per element of the products' operands (4 for float32).
        cache_bytes: bytes per element of the cache.
        products: matrix instructions of the chip: "async", "sync" or "mfma".
        score_tiles: float32 tiles in the pipeline besides keys and values: of a query bias, and of
            each lookup of a score function that depends on query and key.
        latent: the values are a prefix of the keys and are loaded with them.
        native_fp8: whether the chip converts float8 in hardware. For 16-bit queries, latents that
            are decoded from bytes are kept twice with mma.sync: as keys and as values.
        has_score: there is a score function. With "mfma" the compiler may then move weights
            between warps before it rounds them to 16 bits.
    """
    chunks = key_chunks((head_size, head_size_v), tile, query_bytes, products, latent)
    width, width_v = chunks["D0"] + chunks["D1"], chunks["DV0"] + chunks["DV1"]
    stored = width if latent else width + width_v
    in_place = _uses_wgmma(tile, query_bytes, products)
    if tile.num_stages == 1:
        ring = tile.block_n * max(width, width_v) * cache_bytes
    else:
        ring = (tile.num_stages - (not in_place)) * tile.block_n * stored * cache_bytes
    queries = 0 if products == "mfma" else tile.block_m * width * query_bytes
    weight_bytes = 4 if has_score and products == "mfma" else query_bytes
    weights = 0 if in_place else tile.block_m * tile.block_n * weight_bytes
    converted = tile.block_n * max(width, width_v) * query_bytes if cache_bytes < query_bytes else 0
    if latent and not native_fp8 and cache_bytes < query_bytes == 2 and products != "mfma":
        converted += tile.block_n * width_v * query_bytes
    bias = score_tiles * (tile.num_stages - 1) * tile.block_m * tile.block_n * 4
    return max(ring + queries + weights + converted + bias, tile.block_m * width_v * 4) + 2048


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
    tiles: Iterable[Tile],
    sizes: tuple[int, int],
    element_bytes: tuple[int, int],
    limit: int,
    products: str,
    score_tiles: int,
    latent: bool = False,
    native_fp8: bool = True,
    has_score: bool = False,
) -> Tile:
    need = 0
    for tile in tiles:
        need = shared_bytes(
            tile, *sizes, *element_bytes, products, score_tiles, latent, native_fp8, has_score
        )
        if need <= limit:
            return tile
    raise UnsupportedConfigError(
        f"head sizes {sizes[0]} (keys) and {sizes[1]} (values) at {element_bytes[0]} bytes need "
        f"{need} bytes of shared memory with the smallest tile, and the chip allows {limit}; use a "
        "16-bit dtype or the torch backend",
        backend="triton",
    )


def _tiles_of_tables(
    op: str,
    sizes: tuple[int, int],
    element_bytes: tuple[int, int],
    max_rows: int,
    products: str,
    keys_per_sm: int | None,
    native_fp8: bool,
    tuned: TileTable | None,
) -> list[Tile]:
    """Return the tables' tiles for these sizes, best first."""
    query_bytes, cache_bytes = element_bytes
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
        if native_fp8
        else "fp8-bytes"
    )
    problem = TileProblem(
        op, products, elements, width, max(16, next_power_of_2(max_rows)), keys_per_sm
    )
    return [Tile(**dict(entry.tile)) for entry in matching(problem, tuned)]


def choose_prefill_tile(
    head_size: int,
    head_size_v: int,
    query_bytes: int,
    cache_bytes: int,
    max_rows: int,
    shared_memory: int,
    products: str,
    score_tiles: int = 0,
    *,
    lookups: int = 0,
    has_score: bool = False,
    native_fp8: bool = True,
    tuned: TileTable | None = None,
) -> Tile:
    """Return the tile of a prefill.

    It has as many rows as the table's tile for the head size, or fewer if the batch has fewer.

    Args:
        head_size: D, of queries and keys.
        head_size_v: Dv.
        query_bytes: bytes per element of the products' operands (4 for float32).
        cache_bytes: bytes per element of the cache.
        max_rows: query tokens times heads per group of the longest request.
        shared_memory: limit per program in bytes.
        products: matrix instructions of the chip: "async", "sync" or "mfma".
        score_tiles: as in `shared_bytes`.
        lookups: how many of them are lookups of a score function. Their addresses and values take
            registers: with 64 scores per thread, a kernel for sm_80 used 488 bytes of local memory
            per thread. Tiles with lookups have at most 32. With one stage and 64 keys, a kernel
            for sm_89 used 424 bytes.
        has_score: as in `shared_bytes`.
        native_fp8: whether the chip converts float8 in hardware.
        tuned: the user's table for the chip, which precedes the shipped ones.

    Raises:
        UnsupportedConfigError: even the smallest tile does not fit.
    """
    sizes, element_bytes = (head_size, head_size_v), (query_bytes, cache_bytes)
    best = _tiles_of_tables(
        "prefill", sizes, element_bytes, max_rows, products, None, native_fp8, tuned
    )
    rows = max(16, next_power_of_2(max_rows))
    tiles = [_narrowed(tile, min(tile.block_m, rows)) for tile in best]
    smaller = _fallbacks(tiles[0].block_m, tiles[0].num_warps)
    candidates = [*tiles, *smaller]
    if lookups:
        candidates = [
            t for t in candidates
            if t.block_m * t.block_n <= 1024 * t.num_warps and (t.num_stages > 1 or t.block_n <= 32)
        ]  # fmt: skip
    return _first_that_fits(
        candidates, sizes, element_bytes, shared_memory, products, score_tiles, has_score=has_score
    )


def choose_decode_tile(
    head_size: int,
    head_size_v: int,
    query_bytes: int,
    cache_bytes: int,
    max_rows: int,
    shared_memory: int,
    products: str,
    score_tiles: int = 0,
    *,
    keys_per_sm: int | None = None,
    native_fp8: bool = True,
    tuned: TileTable | None = None,
) -> Tile:
    """Return the tile of a decode: as few rows (16 to 64) as hold the group's heads and tokens.

    Other arguments and errors as in `choose_prefill_tile`.

    Args:
        keys_per_sm: `tile_table.work_class`. None if the bits of a row must not depend on other
            requests; the tile is then the one for any amount of work.
    """
    sizes, element_bytes = (head_size, head_size_v), (query_bytes, cache_bytes)
    best = _tiles_of_tables(
        "decode", sizes, element_bytes, max_rows, products, keys_per_sm, native_fp8, tuned
    )
    width = max(sum(split_head_size(head_size)), sum(split_head_size(head_size_v)))
    rows = min(64 if width <= 256 and query_bytes < 4 else 16, max(16, next_power_of_2(max_rows)))
    tiles = [_widened(tile, rows) for tile in best]
    smaller = _fallbacks(rows, tiles[0].num_warps)
    return _first_that_fits(
        [*tiles, *smaller], sizes, element_bytes, shared_memory, products, score_tiles
    )


def latents_in_place(
    capability: tuple[int, int], query_bytes: int, cache_bytes: int, aligned: bool
) -> bool:
    """Return whether asynchronous products over two chunks of keys may read them in place.

    Only on Hopper: tcgen05 on data-center Blackwell needs more shared memory than `shared_bytes`
    estimates. And only where tiles do not reach shared memory through registers, see `head_chunks`.

    Args:
        capability: compute capability of the chip.
        query_bytes: bytes per element of the products' operands.
        cache_bytes: bytes per element of the cache.
        aligned: rows of the cache start on 16-byte boundaries.
    """
    return capability[0] == 9 and cache_bytes == query_bytes and aligned


def choose_latent_tile(
    head_size: int,
    head_size_v: int,
    query_bytes: int,
    cache_bytes: int,
    max_rows: int,
    shared_memory: int,
    products: str,
    score_tiles: int = 0,
    *,
    in_place: bool = True,
    native_fp8: bool = True,
    tuned: TileTable | None = None,
) -> Tile:
    """Return the tile of a decode or prefill over latents, whose values are a prefix of the keys.

    Other arguments and errors as in `choose_prefill_tile`.

    Args:
        in_place: whether asynchronous products may read the keys where they were loaded
            (`latents_in_place`). Elsewhere tiles have fewer rows than such products need.
    """
    sizes, element_bytes = (head_size, head_size_v), (query_bytes, cache_bytes)
    most = 32 if products == "async" and not in_place else 64
    rows = min(most, max(16, next_power_of_2(max_rows)))
    tiles = [
        tile
        for tile in _tiles_of_tables(
            "latent", sizes, element_bytes, rows, products, None, native_fp8, tuned
        )
        if tile.block_m <= rows
    ]
    smaller = _fallbacks(min(rows, 16), 4)
    return _first_that_fits(
        [*tiles, *smaller], sizes, element_bytes, shared_memory, products, score_tiles, True,
        native_fp8,
    )  # fmt: skip
