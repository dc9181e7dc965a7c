"""Tiles of the portable kernels, their shared memory, and how heads are cut into powers of two.

`shared_bytes` is an upper estimate of the shared memory that the compiler allocates. The compile
tests compare it with the compiler's number.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Tile",
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
        # Chunks of one swizzle width for asynchronous products (`head_chunks`).
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
