"""Tiles of the portable kernels fit every chip, and the error names the numbers if none does."""

from __future__ import annotations

import pytest

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.triton.heuristics.choose_tiles import (
    TileRequest,
    choose_decode_tile,
    choose_latent_tile,
    choose_prefill_tile,
)
from attnlib.ops.triton.heuristics.tiles import (
    Tile,
    head_chunks,
    key_chunks,
    latents_in_place,
    next_power_of_2,
    shared_bytes,
    split_head_size,
)

KB = 1024
LIMITS = [48 * KB, 64 * KB, 99 * KB, 163 * KB, 227 * KB]
SIZES = [16, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256, 512]
FORMATS = [(2, 2), (2, 1), (4, 4), (4, 1)]
CHOOSERS = [choose_prefill_tile, choose_decode_tile]


@pytest.mark.parametrize("choose", CHOOSERS)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("products", ["async", "sync", "mfma"])
def test_never_exceeds_the_chip(choose, limit: int, products: str) -> None:  # type: ignore[no-untyped-def]
    """P6 of the field notes: for every head size, format and number of rows."""
    for size in SIZES:
        for formats in FORMATS:
            for rows in (1, 8, 24, 64, 100, 4096):
                if formats[0] == 4 and size == 512 and limit <= 64 * KB and products != "mfma":
                    continue
                for score_tiles in (0, 1, 2):
                    tile = choose(
                        TileRequest((size, size), formats, rows, limit, products, score_tiles)
                    )
                    assert shared_bytes(tile, size, size, *formats, products, score_tiles) <= limit
                assert tile.block_m >= 16 and tile.block_n >= 16 and tile.num_warps in (4, 8)
                assert (
                    tile.block_m & (tile.block_m - 1) == 0
                    and tile.block_n & (tile.block_n - 1) == 0
                )


@pytest.mark.parametrize("choose", CHOOSERS)
def test_head_size_that_fits_nowhere_is_rejected(choose) -> None:  # type: ignore[no-untyped-def]
    """The error names the head sizes, the bytes needed, the limit and the next action."""
    message = (
        r"head sizes 512 \(keys\) and 512 \(values\) at 4 bytes need \d+ bytes of shared memory .* "
        r"the chip allows 49152; use a 16-bit dtype"
    )
    with pytest.raises(UnsupportedConfigError, match=message):
        choose(TileRequest((512, 512), (4, 4), 64, 48 * KB, "sync"))


def test_tiles_follow_the_rows() -> None:
    """A tile has no more rows than the batch, and at least the 16 of a matrix instruction."""
    prefill = {
        rows: choose_prefill_tile(TileRequest((128, 128), (2, 2), rows, 227 * KB, "async")).block_m
        for rows in (1, 17, 60, 9999)
    }
    decode = {
        rows: choose_decode_tile(TileRequest((128, 128), (2, 2), rows, 227 * KB, "async")).block_m
        for rows in (1, 16, 17, 9999)
    }
    assert prefill == {1: 16, 17: 32, 60: 64, 9999: 128}
    assert decode == {1: 16, 16: 16, 17: 32, 9999: 64}


def test_stages_follow_shared_memory() -> None:
    """Head size 128 in 16 bits: three stages on Hopper, two on a chip with 99 KB."""
    assert choose_prefill_tile(TileRequest((128, 128), (2, 2), 4096, 227 * KB, "async")) == Tile(
        128, 64, 8, 3
    )
    assert choose_prefill_tile(TileRequest((128, 128), (2, 2), 4096, 99 * KB, "sync")) == Tile(
        128, 64, 8, 2
    )
    assert choose_decode_tile(TileRequest((128, 128), (2, 2), 4, 227 * KB, "async")) == Tile(
        16, 64, 4, 3
    )


def test_tiles_with_lookups_have_few_scores_per_thread() -> None:
    """Addresses and values of the lookups take registers."""
    for size in (64, 128, 256):
        for limit in (99 * KB, 163 * KB, 227 * KB):
            arguments = ((size, size), (2, 2), 4096, limit, "sync", 1)
            tile = choose_prefill_tile(TileRequest(*arguments), lookups=1)
            assert tile.block_m * tile.block_n <= 32 * 32 * tile.num_warps
    assert (
        choose_prefill_tile(
            TileRequest((128, 128), (2, 2), 4096, 99 * KB, "sync", 1), lookups=1
        ).num_stages
        > 1
    )
    sizes = ((64, 64), (2, 2), 4096, 163 * KB, "sync", 1)
    assert choose_prefill_tile(TileRequest(*sizes)) == Tile(128, 64, 4, 3)
    assert choose_prefill_tile(TileRequest(*sizes), lookups=1) == Tile(128, 32, 4, 2)


def test_head_sizes_are_split_with_little_padding() -> None:
    """One power of two, or two if that pads less."""
    cuts = {
        8: (16, 0), 16: (16, 0), 40: (64, 0), 64: (64, 0), 72: (64, 32), 80: (64, 32), 96: (64, 32),
        112: (128, 0), 120: (128, 0), 128: (128, 0), 192: (128, 64), 256: (256, 0), 512: (512, 0),
        576: (512, 64),
    }  # fmt: skip
    assert {size: split_head_size(size) for size in cuts} == cuts
    for size in range(1, 600):
        large, small = split_head_size(size)
        assert size <= large + small <= max(16, next_power_of_2(size))
        assert small == 0 or (small >= 32 and large < size)


PAIRS = [(80, 80), (96, 96), (192, 128), (128, 16), (16, 128), (64, 32), (32, 16), (32, 32)]


@pytest.mark.parametrize("sizes", PAIRS)
def test_heads_of_asynchronous_products_are_one_chunk(sizes: tuple[int, int]) -> None:
    """And rows of keys and values have one swizzle width: ptxas 12.8 compiles wrong descriptors
    otherwise (draw seeds 3000589, 3001603, 3001605, 3003003)."""
    split = (*split_head_size(sizes[0]), *split_head_size(sizes[1]))
    for rows, products in ((256, "async"), (16, "async"), (256, "sync"), (256, "mfma")):
        tile = choose_prefill_tile(TileRequest(sizes, (2, 2), rows, 227 * 1024, products))
        first, second, first_v, second_v = head_chunks(sizes, tile, 2, products)
        assert first + second >= sizes[0] and first_v + second_v >= sizes[1]
        if products == "async" and tile.block_m >= 64:
            assert second == second_v == 0 and min(first, 64) == min(first_v, 64)
        else:
            assert (first, second, first_v, second_v) == split
        assert head_chunks(sizes, tile, 4, products) == split, "float32 has none"


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("products", ["async", "sync", "mfma"])
def test_tiles_of_latents_fit(limit: int, products: str) -> None:
    """P6: latents of 576 elements on every chip, except float32 with less than 64 KB."""
    for formats in FORMATS:
        for rows in (1, 16, 32, 128, 4096):
            if formats[0] == 4 and limit <= 64 * KB and products != "mfma":
                continue
            for in_place, native in ((True, True), (False, True), (False, False)):
                if not native and limit < 64 * KB:
                    continue  # no such chip
                tile = choose_latent_tile(
                    TileRequest((576, 512), formats, rows, limit, products, native_fp8=native),
                    in_place=in_place,
                )
                need = shared_bytes(
                    tile, 576, 512, *formats, products, latent=True, native_fp8=native
                )
                assert need <= limit and tile.block_m <= max(16, rows)
                assert in_place or products != "async" or tile.block_m <= 32


def test_latents_are_cut_into_values_and_the_rest() -> None:
    """P10: the first chunk is the value, padded where it is no power of two."""
    cuts = {(576, 512): (512, 64), (72, 40): (64, 32), (64, 64): (64, 0), (24, 8): (16, 32)}
    for sizes, (first, second) in cuts.items():
        found = key_chunks(sizes, Tile(16, 32, 8, 2), 2, "async", latent=True)
        assert found == {"D0": first, "D1": second, "DV0": first, "DV1": 0}
        # Both chunks of a key have the swizzle of 128 bytes where products read them in place.
        wide = key_chunks(sizes, Tile(64, 32, 8, 2), 2, "async", latent=True)
        assert wide["D0"] == wide["DV0"] == max(64, first)
        assert wide["D1"] == (max(64, second) if second else 0)


def test_only_hopper_reads_latents_in_place() -> None:
    """And only aligned 16-bit rows: others reach shared memory through registers."""
    assert latents_in_place((9, 0), 2, 2, True)
    for arguments in (((10, 0), 2, 2, True), ((9, 0), 2, 1, True), ((9, 0), 2, 2, False)):
        assert not latents_in_place(*arguments)
