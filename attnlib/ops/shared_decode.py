"""Work items of a decode whose requests share prefixes, and their division over thread blocks.

A segment is a range of keys that some query tokens see completely: a shared prefix with tokens of
its requests, or the keys that one request has for itself. A work item has the query rows of one or
two matrix products, and segments of keys that parts of these rows see. The tiles of all items form
one line, which is cut into similar ranges (stream-K, Osama et al. 2023), as many as a GPU
holds at a time for each KV head. The tiles of one item in one range are a split, which has partial
results of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

__all__ = [
    "ITEM_FIELDS",
    "PRODUCT_ROWS",
    "SEGMENT_FIELDS",
    "DecodeItems",
    "ItemLists",
    "Segment",
    "padded_size",
    "schedule_items",
]

ITEM_FIELDS = 8
"""Integers of an item on the device: tiles before it, its tiles, first entry of `tokens`, number of
tokens, first partial row, the first token, whether the tokens are consecutive, its first range."""

SEGMENT_FIELDS = 8
"""Integers of a segment on the device: tiles before it, its tiles, row and first column of the
block table, keys, first token that sees them within those of the item, number of these tokens,
0."""

PRODUCT_ROWS = 64
"""Query rows of one matrix product."""


class Segment(NamedTuple):
    """Keys that some query tokens see completely.

    Attributes:
        request: row of the block table that has them.
        start: position of the first key, a multiple of the block size.
        keys: their number, at least 1.
        tokens: rows of the queries.
    """

    request: int
    start: int
    keys: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DecodeItems:
    """The items of one batch on the device, all int32.

    An item of more than `PRODUCT_ROWS` query rows per KV head has one segment, and each of two
    consumers computes all tiles for half of the tokens. An item of fewer rows is computed by both
    in turn, tile by tile. Each split has one partial result of every token.

    Attributes:
        num_tokens: rows of the queries that may have a request.
        num_partials: P, rows of partial results; an upper bound for items of a captured step.
        num_ranges: ranges of the tiles.
        tile_keys: keys of a tile.
        ranges: [num_ranges * 4] the first tile of each range, its end, and the item and the segment
            in which it begins.
        segments: [segments * SEGMENT_FIELDS], those of each item together.
        items: [items * ITEM_FIELDS].
        tokens: query rows, those of each item together.
        partial_starts: [num_tokens + 1] entries of `partial_rows` of each token.
        partial_rows: partial results, grouped by token.
    """

    num_tokens: int
    num_partials: int
    num_ranges: int
    tile_keys: int
    ranges: torch.Tensor
    segments: torch.Tensor
    items: torch.Tensor
    tokens: torch.Tensor
    partial_starts: torch.Tensor
    partial_rows: torch.Tensor


class ItemLists(NamedTuple):
    """The items of one batch on the host; `lists` has the tensors of `DecodeItems` in their order,
    the other fields are those of `DecodeItems`."""

    lists: tuple[list[int], ...]
    num_tokens: int
    num_partials: int
    num_ranges: int
    tile_keys: int

    def to_device(self, device: torch.device) -> DecodeItems:
        """The items on the device, by one copy."""
        sizes = [len(numbers) for numbers in self.lists]
        packed = torch.tensor(self.packed(sizes), dtype=torch.int32)
        return self.of(packed.to(device, non_blocking=True), sizes)

    def packed(self, sizes: Sequence[int]) -> list[int]:
        """All lists behind each other, with zeros after each up to its size, and up to the next
        multiple of 16 bytes."""
        values: list[int] = []
        for numbers, size in zip(self.lists, sizes, strict=True):
            values += numbers
            values += [0] * (padded_size(size) - len(numbers))
        return values

    def of(self, packed: torch.Tensor, sizes: Sequence[int]) -> DecodeItems:
        """The items in a tensor of `packed` lists of these sizes."""
        parts = torch.split(packed, [padded_size(size) for size in sizes])
        tensors = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        return DecodeItems(
            self.num_tokens, self.num_partials, self.num_ranges, self.tile_keys, *tensors
        )


def padded_size(size: int) -> int:
    """The next multiple of 16 bytes, in int32 elements."""
    return -(-size // 4) * 4


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
    grouped = _group_segments(segments, most)
    begins = _cuts(grouped, most, tile_keys, num_ranges)
    segment_fields: list[int] = []
    item_fields: list[int] = []
    tokens: list[int] = []
    of_token: list[list[int]] = [[] for _ in range(num_tokens)]
    ranges: list[int] = []
    before = partials = num_segments = this = 0
    for number, item in enumerate(grouped):
        members, begin = len(item.tokens), before
        while begins[this + 1] <= begin:
            this += 1
        first_range = this
        for segment, place in item.segments:
            count, seeing = -(-segment.keys // tile_keys), len(segment.tokens)
            column = segment.start // block_size
            segment_fields += (
                before, count, segment.request, column, segment.keys, place, seeing, 0,
            )  # fmt: skip
            end = before + count
            while len(ranges) < 4 * num_ranges and begins[len(ranges) // 4] < end:
                index = len(ranges) // 4
                ranges += (begins[index], begins[index + 1], number, num_segments)
            while before < end:
                while begins[this + 1] <= before:
                    this += 1
                row = partials + (this - first_range) * members + place
                for token in segment.tokens:
                    # Segments of a split add to the same partial results.
                    found = of_token[token]
                    if row not in found[-1:]:
                        found.append(row)
                    row += 1
                before = min(end, begins[this + 1])
            num_segments += 1
        first_token = item.tokens[0]
        consecutive = item.tokens == list(range(first_token, first_token + members))
        item_fields += (
            begin, before - begin, len(tokens), members, partials, first_token, consecutive,
            first_range,
        )  # fmt: skip
        tokens += item.tokens
        partials += (this - first_range + 1) * members
    ranges += [0] * (4 * num_ranges - len(ranges))  # without tiles
    starts = [0]
    for rows in of_token:
        starts.append(starts[-1] + len(rows))
    entries = [row for rows in of_token for row in rows]
    lists = ranges, segment_fields, item_fields, tokens, starts, entries
    return ItemLists(lists, num_tokens, partials, num_ranges, tile_keys)
