"""The number of splits of a decode: pure arithmetic on upper bounds."""

from __future__ import annotations

import pytest

from attnlib.ops.triton.heuristics.splits import (
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    choose_num_splits,
    choose_uniform_splits,
    paged_decode_workspace_bytes,
    splits_per_load,
    visible_bound,
)

RESIDENT = 132 * 3
BLOCKS = 8


@pytest.mark.parametrize("batch", range(1, 33))
@pytest.mark.parametrize("num_blocks", [1, 8])
def test_long_requests_fill_the_chip(batch: int, num_blocks: int) -> None:
    """P4 of the field notes: at 32k, every multiprocessor has a program at any batch size."""
    splits = choose_num_splits(batch, num_blocks, 32768, 64, RESIDENT)
    assert batch * num_blocks * splits >= 132


def test_bound_decreases_gradually_with_the_batch() -> None:
    """P4 of the field notes: the bound never increases with the batch and stays within 4 waves."""
    bounds = [choose_num_splits(batch, BLOCKS, 32768, 64, RESIDENT) for batch in range(1, 400)]
    assert bounds == sorted(bounds, reverse=True)
    for batch, splits in enumerate(bounds, start=1):
        assert batch * BLOCKS * splits <= 4 * RESIDENT + batch * BLOCKS
    assert bounds[-1] == 1


def test_splits_have_at_least_two_tiles() -> None:
    """So that loads overlap; a request without visible keys has one split."""
    assert choose_num_splits(1, 1, 64 * 10, 64, RESIDENT) == 10 // MIN_TILES_PER_SPLIT
    assert choose_num_splits(1, 1, 64, 64, RESIDENT) == 1
    assert choose_num_splits(1, 1, 0, 64, RESIDENT) == 1
    assert choose_num_splits(0, 8, 4096, 64, RESIDENT) >= 1
    assert choose_num_splits(1, 1, 1 << 22, 64, 10_000) == MAX_SPLITS


def test_visible_bound_follows_windows_and_chunks() -> None:
    """P5 of the field notes: the window and the chunk bound the work."""
    assert visible_bound(1, 65536, (-1, -1), True, 0) == 65536
    assert visible_bound(1, 65536, (127, -1), True, 0) == 128
    assert visible_bound(4, 65536, (127, 0), True, 0) == 131
    assert visible_bound(1, 65536, (127, -1), False, 0) == 65536
    assert visible_bound(1, 65536, (127, 64), False, 0) == 192
    assert visible_bound(1, 65536, (-1, -1), True, 8192) == 8192
    assert visible_bound(1, 100, (127, -1), True, 8192) == 100


def test_workspace_bytes() -> None:
    """P3 of the field notes: an output and an LSE per split, a count per token; 0 for one split."""
    assert paged_decode_workspace_bytes(10, 32, 128, 8) == 4 * (10 * 32 * 8 * 129 + 10)
    assert paged_decode_workspace_bytes(10, 32, 128, 1) == 0


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        ((1, 8, 8192, 64, 528), 64),
        ((1, 8, 131072, 64, 528), 66),
        ((8, 8, 8192, 64, 528), 33),
        ((64, 8, 8192, 64, 528), 5),
        ((256, 8, 1024, 64, 528), 2),
        ((1, 1, 1 << 22, 64, 528), 256),
        ((2, 2, 300, 32, 216), 5),
        ((48, 1, 32768, 16, 108), 9),
    ],
)
def test_recorded_choices(arguments: tuple[int, ...], recorded: int) -> None:
    """Recorded at commit 6507bdb."""
    assert choose_num_splits(*arguments) == recorded


@pytest.mark.parametrize(
    ("rows", "width", "expected"), [(8, 64, 16), (8, 128, 8), (32, 128, 2), (64, 256, 1)]
)
def test_partial_results_of_one_load_fit_in_64_registers(
    rows: int, width: int, expected: int
) -> None:
    assert splits_per_load(rows, width) == expected
    assert expected == 1 or expected * rows * width <= 64 * 128


def test_lists_of_equal_lengths_are_split_into_one_wave() -> None:
    """32 lists of 2048 latents on 132 programs, 8 x 4 lists of 2048 keys on 396, and few keys."""
    assert choose_uniform_splits(32, 2048, 32, 132) == 4
    assert choose_uniform_splits(32, 2048, 64, 396) == 12
    assert choose_uniform_splits(4, 2048, 64, 396) == 16
    assert choose_uniform_splits(1, 64, 64, 396) == 1
    assert choose_uniform_splits(4096, 2048, 64, 132) == 1
