"""Tile choice as a pure function: it fits every chip, and says so when it cannot."""

from __future__ import annotations

import pytest

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.triton.heuristics.tiles import (
    Tile,
    choose_decode_tile,
    choose_prefill_tile,
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
    """P6 of the field notes: whatever the head size, format and number of rows, the estimate stays below the limit."""
    for size in SIZES:
        for formats in FORMATS:
            for rows in (1, 8, 24, 64, 100, 4096):
                if formats[0] == 4 and size == 512 and limit <= 64 * KB and products != "mfma":
                    continue
                for has_bias in (False, True):
                    tile = choose(size, size, *formats, rows, limit, products, has_bias)
                    assert shared_bytes(tile, size, size, *formats, products, has_bias) <= limit
                assert tile.block_m >= 16 and tile.block_n >= 16 and tile.num_warps in (4, 8)
                assert (
                    tile.block_m & (tile.block_m - 1) == 0
                    and tile.block_n & (tile.block_n - 1) == 0
                )


@pytest.mark.parametrize("choose", CHOOSERS)
def test_what_fits_nowhere_is_refused_with_the_numbers(choose) -> None:  # type: ignore[no-untyped-def]
    """The refusal names the head sizes, the bytes needed, the limit and what to do."""
    with pytest.raises(UnsupportedConfigError, match=r"head sizes 512 \(keys\) and 512 \(values\) at 4 bytes need \d+ "
                       r"bytes of shared memory .* the chip allows 49152; use a 16-bit dtype"):  # fmt: skip
        choose(512, 512, 4, 4, 64, 48 * KB, "sync")


def test_tiles_follow_the_rows() -> None:
    """A tile has no more rows than the batch can fill, and at least the 16 that the tensor cores want."""
    prefill = {
        rows: choose_prefill_tile(128, 128, 2, 2, rows, 227 * KB, "async").block_m
        for rows in (1, 17, 60, 9999)
    }
    decode = {
        rows: choose_decode_tile(128, 128, 2, 2, rows, 227 * KB, "async").block_m
        for rows in (1, 16, 17, 9999)
    }
    assert prefill == {1: 16, 17: 32, 60: 64, 9999: 128}
    assert decode == {1: 16, 16: 16, 17: 32, 9999: 64}


def test_big_chips_get_big_tiles() -> None:
    """Head size 128 in 16 bits: 128 rows, 64 keys in three stages and 8 warps on Hopper, fewer stages where shared memory is."""
    assert choose_prefill_tile(128, 128, 2, 2, 4096, 227 * KB, "async") == Tile(128, 64, 8, 3)
    assert choose_prefill_tile(128, 128, 2, 2, 4096, 99 * KB, "sync") == Tile(128, 64, 8, 2)
    assert choose_decode_tile(128, 128, 2, 2, 4, 227 * KB, "async") == Tile(16, 64, 4, 3)


def test_head_sizes_are_cut_without_waste() -> None:
    """One power of two, or two where that pads less."""
    cuts = {16: (16, 0), 8: (16, 0), 40: (64, 0), 64: (64, 0), 72: (64, 32), 80: (64, 32), 96: (64, 32), 112: (128, 0),
            120: (128, 0), 128: (128, 0), 192: (128, 64), 256: (256, 0), 512: (512, 0), 576: (512, 64)}  # fmt: skip
    assert {size: split_head_size(size) for size in cuts} == cuts
    for size in range(1, 600):
        large, small = split_head_size(size)
        assert size <= large + small <= max(16, next_power_of_2(size))
        assert small == 0 or (small >= 32 and large < size)
