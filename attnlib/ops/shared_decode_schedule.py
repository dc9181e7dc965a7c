"""Division of decodes with shared prefixes: segments become items, and tiles become ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from attnlib.ops.shared_decode import (
    PRODUCT_ROWS,
    SEGMENT_FIELDS,
    ItemLists,
    Segment,
)

__all__ = ["schedule_items"]


@dataclass(eq=False)
class _Item:
    """Query tokens, and segments with the place of their first token among them."""

    tokens: list[int] = field(default_factory=list)
    segments: list[tuple[Segment, int]] = field(default_factory=list)


def _group_segments(segments: Sequence[Segment], most: int) -> list[_Item]:
    """Items of at most `most` tokens, and one for each segment of more.

    A segment joins an item that has its tokens in its order, otherwise the last one if there is
    room for its tokens.
    """
    items: list[_Item] = []
    last = _Item()
    item_of: dict[int, tuple[_Item, int]] = {}
    for segment in segments:
        count = len(segment.tokens)
        if count > most:
            items.append(_Item(list(segment.tokens), [(segment, 0)]))
            continue
        item, place = item_of.get(segment.tokens[0], (last, 0))
        if tuple(item.tokens[place : place + count]) != segment.tokens:
            fits = len(last.tokens) + count <= most
            if not last.tokens or not fits or not set(last.tokens).isdisjoint(segment.tokens):
                last = _Item()
                items.append(last)
            item, place = last, len(last.tokens)
            for token in segment.tokens:
                item_of[token] = item, len(item.tokens)
                item.tokens.append(token)
        item.segments.append((segment, place))
    return items


def _equal_cuts(tiles: int, num_ranges: int, first: int = 0) -> list[int]:
    """The first tile of each of `num_ranges` equal ranges of `tiles` tiles from `first` on."""
    return [first + -(-number * tiles // num_ranges) for number in range(num_ranges)]


def _cost_cuts(sizes: Sequence[int], num_ranges: int) -> list[int]:
    """The first tile of each range, and the number of all tiles; ranges have equal costs.

    The cost of a segment is its tiles and half a tile, spread over its tiles: a short segment
    takes longer than the tiles that it has.

    Args:
        sizes: tiles of each segment.
        num_ranges: at least 1.
    """
    total = 2 * sum(sizes) + len(sizes)  # in half tiles
    cuts: list[int] = []
    tiles = cost = 0
    for size in sizes:
        own = 2 * size + 1
        # Products of integers, so that quotients are exact.
        while (past := len(cuts) * total - cost * num_ranges) < own * num_ranges:
            cuts.append(tiles + -(-past * size // (own * num_ranges)))
        tiles += size
        cost += own
    return cuts + [tiles] * (num_ranges + 1 - len(cuts))


def _cuts(items: Sequence[_Item], most: int, tile_keys: int, num_ranges: int) -> list[int]:
    """The first tile of each range, and the number of all tiles.

    Ranges have equal costs if no item has more than `most` tokens, and else equal numbers of tiles.
    Where such items begin the line and have the same keys, they are cut at the same tiles, unless
    ranges become more than an eighth longer by it. Thread blocks that read the same keys then read
    them at the same time.
    """
    tiles_of = [[-(-s.keys // tile_keys) for s, _ in item.segments] for item in items]
    if all(len(item.tokens) <= most for item in items):
        return _cost_cuts([tiles for sizes in tiles_of for tiles in sizes], num_ranges)
    sizes = [sum(tiles) for tiles in tiles_of]
    total = sum(sizes)
    equal = [*_equal_cuts(total, num_ranges), total]
    keys = [[segment[:3] for segment, _ in item.segments] for item in items]
    alike = 0
    while alike < len(items) and len(items[alike].tokens) > most and keys[alike] == keys[0]:
        alike += 1
    tiles, rest = sizes[0], total - alike * sizes[0]
    # (tiles of the longest range, ranges of each of these items); other items need a range, too.
    divided = [
        (max(-(-tiles // number), -(-rest // max(1, num_ranges - alike * number))), number)
        for number in range(1, (num_ranges - (rest > 0)) // max(1, alike) + 1)
    ]
    if alike < 2 or not divided or 8 * min(divided)[0] > 9 * -(-total // num_ranges):
        return equal
    per_item = min(divided)[1]
    cuts: list[int] = []
    for number in range(alike):
        cuts += _equal_cuts(tiles, per_item, number * tiles)
    others = num_ranges - alike * per_item
    return [*cuts, *_equal_cuts(rest, others, alike * tiles), total]


def schedule_items(
    segments: Sequence[Segment],
    num_tokens: int,
    group: int,
    block_size: int,
    tile_keys: int,
    num_ranges: int,
) -> ItemLists:
    """Group segments to items, and divide their tiles into ranges.

    Args:
        segments: at most `2 * (PRODUCT_ROWS // group)` tokens each.
        num_tokens: query tokens of the batch.
        group: query heads per KV head.
        block_size: N.
        tile_keys: keys of a tile.
        num_ranges: ranges, at least 1.
    """
    most = PRODUCT_ROWS // group
    items = _group_segments(segments, most)
    cuts = _cuts(items, most, tile_keys, num_ranges)
    line = _Line(cuts, num_tokens, block_size, tile_keys)
    for item in items:
        line.add(item)
    return line.lists()


class _Line:
    """The tiles of items, one behind the other, and the ranges that they are cut into.

    Args:
        cuts: the first tile of each range, and the number of all tiles.
        num_tokens: query tokens of the batch.
        block_size: N.
        tile_keys: keys of a tile.
    """

    def __init__(
        self, cuts: Sequence[int], num_tokens: int, block_size: int, tile_keys: int
    ) -> None:
        self._cuts = cuts
        self._block_size = block_size
        self._tile_keys = tile_keys
        self._of_token: list[list[int]] = [[] for _ in range(num_tokens)]
        self._ranges: list[int] = []
        self._segments: list[int] = []
        self._items: list[int] = []
        self._tokens: list[int] = []
        self._num_ranges, self._num_items = len(cuts) - 1, 0
        self._tiles = self._partials = 0
        self._range = 0  # of the next tile
        self._begun = 0  # ranges of which the first tile was added

    def add(self, item: _Item) -> None:
        """Add the tiles of an item."""
        members, begin, first_token = len(item.tokens), self._tiles, item.tokens[0]
        while self._cuts[self._range + 1] <= begin:
            self._range += 1
        first_range = self._range
        for segment, place in item.segments:
            self._add_segment(segment, place, members, first_range)
        consecutive = item.tokens == list(range(first_token, first_token + members))
        first, rows = len(self._tokens), self._partials
        self._items += (begin, self._tiles - begin, first, members, rows)
        self._items += (first_token, consecutive, first_range)
        self._tokens += item.tokens
        self._num_items += 1
        self._partials += (self._range - first_range + 1) * members

    def _add_segment(self, segment: Segment, place: int, members: int, first_range: int) -> None:
        request, start, keys, tokens = segment
        tiles, this, cuts, of_token = self._tiles, self._range, self._cuts, self._of_token
        count, column = -(-keys // self._tile_keys), start // self._block_size
        end, begun = tiles + count, self._begun
        while begun < self._num_ranges and cuts[begun] < end:
            number = len(self._segments) // SEGMENT_FIELDS
            self._ranges += (cuts[begun], cuts[begun + 1], self._num_items, number)
            begun += 1
        self._begun = begun
        self._segments += (tiles, count, request, column, keys, place, len(tokens), 0)
        while tiles < end:
            while cuts[this + 1] <= tiles:
                this += 1
            row = self._partials + (this - first_range) * members + place
            for token in tokens:
                # Segments of a split add to the same partial results.
                found = of_token[token]
                if row not in found[-1:]:
                    found.append(row)
                row += 1
            tiles = min(end, cuts[this + 1])
        self._tiles, self._range = tiles, this

    def lists(self) -> ItemLists:
        """The items of all tiles that were added."""
        num_ranges = self._num_ranges
        ranges = self._ranges + [0] * (4 * num_ranges - len(self._ranges))  # without tiles
        starts = list(accumulate(map(len, self._of_token), initial=0))
        entries = [row for rows in self._of_token for row in rows]
        lists = ranges, self._segments, self._items, self._tokens, starts, entries
        sizes = (len(self._of_token), self._partials, num_ranges, self._tile_keys)
        return ItemLists(lists, *sizes)
