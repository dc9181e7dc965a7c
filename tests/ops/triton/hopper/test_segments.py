"""Tests of the segments of keys of the batch-invariant Hopper kernels."""

from __future__ import annotations

import pytest

from attnlib.ops.triton.hopper.kernels.segments import MOST_QUERY_ROWS, QUERY_ROWS, _segment


@pytest.mark.parametrize("width_v", [64, 128, 256])
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 16, 64])
def test_segments_of_later_queries_end_where_those_of_earlier_ones_do(
    width_v: int, block_n: int, group: int
) -> None:
    """M15: a decode is cut at the ends of its last query's segments, which are ends of all."""
    first, second, last = (_segment(number, width_v, group, block_n) for number in range(3))
    tiles = [first[1], second[1], last[1]]
    assert all(count > 0 and count & (count - 1) == 0 for count in tiles), tiles
    assert tiles == sorted(tiles), tiles
    assert 0 <= first[0] <= second[0]
    # All queries of a query tile of the prefill have segments of one length.
    rows = MOST_QUERY_ROWS if width_v <= 64 and 64 % group == 0 else QUERY_ROWS
    assert first[0] % (rows // group) == 0 and second[0] % (rows // group) == 0


def test_values_of_64_elements_have_segments_of_as_many_bytes() -> None:
    """Beyond the first queries, whose short segments divide decodes of few keys."""
    for number in (1, 2):
        position, tiles = _segment(number, 128, 4, 128)
        slim_position, slim_tiles = _segment(number, 64, 4, 128)
        assert slim_tiles == 2 * tiles
        assert abs(slim_position - position) < MOST_QUERY_ROWS
