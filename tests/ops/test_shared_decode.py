"""The schedule of decodes with shared prefixes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from attnlib.ops.shared_decode import (
    ITEM_FIELDS,
    PRODUCT_ROWS,
    SEGMENT_FIELDS,
    ItemLists,
    Segment,
)
from attnlib.ops.shared_decode_schedule import schedule_items

GROUP, BLOCK = 16, 4
MOST = PRODUCT_ROWS // GROUP  # tokens of an item that both consumers compute in turn


def _segments(seed: int) -> tuple[list[Segment], int]:
    """Prefixes of two levels and the other keys of each token."""
    draw = random.Random(seed)
    tokens = draw.randint(1, 14)
    segments = []
    for _ in range(2):
        first = 0
        while first < tokens:
            count = min(draw.randint(1, 2 * MOST), tokens - first)
            if count > 1:
                members = tuple(range(first, first + count))
                segments.append(Segment(first, 0, BLOCK * draw.randint(1, 20), members))
            first += count
    for token in range(tokens):
        if draw.random() < 0.9:
            segments.append(Segment(token, 80, draw.randint(1, 30), (token,)))
    return segments, tokens


def _rows(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]


def _computed(found: ItemLists) -> tuple[list[Counter[tuple[int, int]]], Counter[int]]:
    """Follow the kernel.

    Returns:
        ((segment, tile) that each partial row has, tiles of each range).
    """
    ranges, _, _, tokens, _, _ = found.lists
    segments = _rows(found.lists[1], SEGMENT_FIELDS)
    items = _rows(found.lists[2], ITEM_FIELDS)
    parts: list[Counter[tuple[int, int]]] = [Counter() for _ in range(found.num_partials)]
    sizes: Counter[int] = Counter()
    for number, (position, end, item, segment) in enumerate(_rows(ranges, 4)):
        while position < end:
            begin, tiles, start, members, partial, first, consecutive, first_range = items[item]
            if consecutive:
                assert tokens[start : start + members] == list(range(first, first + members))
            split = number - first_range
            for step in range(min(begin + tiles, end) - position):
                tile = position + step
                while tile >= sum(segments[segment][:2]):
                    segment += 1
                before, _, _, _, _, place, seeing, _ = segments[segment]
                assert tile >= before
                row = partial + members * split
                for entry in range(row + place, row + place + seeing):
                    parts[entry][segment, tile - before] += 1
                sizes[number] += 1
            position, item = min(begin + tiles, end), item + 1
    return parts, sizes


@pytest.mark.parametrize("seed", range(12))
def test_each_token_has_each_of_its_keys_once(seed: int) -> None:
    """Tiles of all segments of a token are in its partial results, in ranges of about one size."""
    tile_keys, num_ranges = ((8, 1), (4, 3), (1, 7), (2, 60))[seed % 4]
    segments, num_tokens = _segments(seed)
    found = schedule_items(segments, num_tokens, GROUP, BLOCK, tile_keys, num_ranges)
    parts, sizes = _computed(found)
    _, _, items, _, starts, rows = found.lists
    assert max(sizes.values()) <= 1.125 * sum(sizes.values()) / num_ranges + 2
    assert len(rows) == len(set(rows))
    for token in range(num_tokens):
        got: Counter[tuple[int, int]] = Counter()
        for row in rows[starts[token] : starts[token + 1]]:
            assert parts[row], "a partial result without keys is merged"
            got += parts[row]
        assert set(got.values()) <= {1}
        wanted = sum(-(-s.keys // tile_keys) for s in segments if token in s.tokens)
        assert len(got) == wanted
    assert all(item[3] <= 2 * MOST for item in _rows(items, ITEM_FIELDS))


def test_requests_of_one_prefix_are_one_item() -> None:
    """Segments of the same tokens have one item, and others the room that is left."""
    prefix = Segment(0, 0, 64, (0, 1, 2, 3))
    own = [Segment(token, 64, 8, (token,)) for token in range(6)]
    found = schedule_items([prefix, *own], 6, GROUP, BLOCK, 8, 2)
    items = _rows(found.lists[2], ITEM_FIELDS)
    assert [item[:4] for item in items] == [[0, 12, 0, 4], [12, 2, 4, 2]]
    assert found.lists[0] == [0, 9, 0, 0, 9, 14, 0, 2]


@pytest.mark.parametrize(
    ("own", "begins"),
    [
        (16, [0, 4, 8, 12, 16, 20, 24, 28]),
        (18, [0, 4, 8, 12, 16, 21, 25, 30]),
        (4, [0, 3, 6, 8, 11, 14, 16, 18]),
        (8, [0, 3, 6, 9, 12, 15, 18, 21]),
    ],
    ids=["equal", "longer-ranges", "shorter-ranges", "too-unequal"],
)
def test_items_of_one_prefix_are_cut_alike(own: int, begins: list[int]) -> None:
    """Two items of a prefix of eight tiles, and `own` tiles of another item."""
    most = 2 * MOST
    members = [tuple(range(first, first + most)) for first in (0, most)]
    segments = [Segment(0, 0, 32, tokens) for tokens in members]
    found = schedule_items(
        [*segments, Segment(0, 32, 4 * own, (0,))], 2 * most, GROUP, BLOCK, 4, 8
    )  # fmt: skip
    assert [numbers[0] for numbers in _rows(found.lists[0], 4)] == begins


def test_many_tokens_of_a_prefix_are_an_item_alone() -> None:
    """Both consumers compute all its tiles, for different tokens."""
    members = tuple(range(2 * MOST))
    found = schedule_items(
        [Segment(0, 0, 8, members), *(Segment(token, 8, 4, (token,)) for token in members)],
        2 * MOST, GROUP, BLOCK, 4, 1,
    )  # fmt: skip
    assert [item[3] for item in _rows(found.lists[2], ITEM_FIELDS)] == [8, 4, 4]
    assert found.num_partials == 8 + 4 + 4
