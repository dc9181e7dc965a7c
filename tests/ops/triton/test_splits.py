"""How many splits a decode may use: pure arithmetic on upper bounds."""

from __future__ import annotations

import pytest

from attnlib.ops.triton.heuristics.splits import (
    MIN_TILES_PER_SPLIT,
    SPLIT_LIMIT,
    choose_num_splits,
    paged_decode_workspace_bytes,
    visible_bound,
)

SLOTS = 132 * 3
GROUPS = 8


@pytest.mark.parametrize("batch", range(1, 33))
@pytest.mark.parametrize("query_groups", [1, 8])
def test_long_requests_fill_the_chip(batch: int, query_groups: int) -> None:
    """P4 of the field notes: at 32k, whatever the batch, there are programs for every multiprocessor."""
    splits = choose_num_splits(batch, query_groups, 32768, 64, SLOTS)
    assert batch * query_groups * splits >= 132


def test_no_cliff_as_the_batch_grows() -> None:
    """P4 of the field notes: one more request never changes the bound by more than its share."""
    bounds = [choose_num_splits(batch, GROUPS, 32768, 64, SLOTS) for batch in range(1, 400)]
    assert bounds == sorted(bounds, reverse=True)
    for batch, splits in enumerate(bounds, start=1):
        assert batch * GROUPS * splits <= 4 * SLOTS + batch * GROUPS
    assert bounds[-1] == 1


def test_short_requests_are_not_cut_to_crumbs() -> None:
    """A split has at least two tiles, so that loads overlap; nothing visible is one split."""
    assert choose_num_splits(1, 1, 64 * 10, 64, SLOTS) == 10 // MIN_TILES_PER_SPLIT
    assert choose_num_splits(1, 1, 64, 64, SLOTS) == 1
    assert choose_num_splits(1, 1, 0, 64, SLOTS) == 1
    assert choose_num_splits(0, 8, 4096, 64, SLOTS) >= 1
    assert choose_num_splits(1, 1, 1 << 22, 64, 10_000) == SPLIT_LIMIT


def test_what_is_visible_follows_windows_and_chunks() -> None:
    """P5 of the field notes: work is bounded by the window, on the side it bounds."""
    assert visible_bound(1, 65536, (-1, -1), True, 0) == 65536
    assert visible_bound(1, 65536, (127, -1), True, 0) == 128
    assert visible_bound(4, 65536, (127, 0), True, 0) == 131
    assert visible_bound(1, 65536, (127, -1), False, 0) == 65536
    assert visible_bound(1, 65536, (127, 64), False, 0) == 192
    assert visible_bound(1, 65536, (-1, -1), True, 8192) == 8192
    assert visible_bound(1, 100, (127, -1), True, 8192) == 100


def test_workspace_bytes() -> None:
    """P3 of the field notes: a partial output and an LSE per split, a count per token, nothing for one split."""
    assert paged_decode_workspace_bytes(10, 32, 128, 8) == 4 * (10 * 32 * 8 * 129 + 10)
    assert paged_decode_workspace_bytes(10, 32, 128, 1) == 0
