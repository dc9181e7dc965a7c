"""Work items of a decode whose requests share prefixes, and their division over thread blocks.

An item is a range of keys that some query tokens see completely: a shared prefix with tokens of its
requests, or the keys that one request has for itself. The tiles of all items form one line, which
is cut into equal ranges (stream-K, Osama et al. 2023), as many as a GPU holds at a time for each KV
head. The tiles of one item in one range are a split, which has partial results of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = [
    "ITEM_FIELDS",
    "PRODUCT_ROWS",
    "WHOLE_TILES",
    "DecodeItem",
    "DecodeItems",
    "ItemLists",
    "padded_size",
    "schedule_items",
]

ITEM_FIELDS = 8
"""Integers of an item on the device: tiles before it, its tiles, row and first column of the block
table, keys, first entry of `tokens` (the token itself if there is one), number of tokens, first
partial row."""

PRODUCT_ROWS = 64
"""Query rows of one matrix product."""

WHOLE_TILES = 8
"""Tiles of an item up to which one of two consumers computes it, while the other one computes the
next item. On an H200 the beginning and the end of an item take about 5 us, 128
keys 2 us."""


class DecodeItem(NamedTuple):
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

    Of an item of more than `PRODUCT_ROWS` query rows per KV head each of two consumers computes all
    tiles for half of the tokens. One of fewer rows and more than `WHOLE_TILES` tiles is computed by
    both in turn, tile by tile; each split then has two partial results of every token. Other items
    are computed by one consumer each.

    Attributes:
        num_tokens: rows of the queries that may have a request.
        num_partials: P, rows of partial results; an upper bound for items of a captured step.
        num_ranges: ranges of the tiles.
        tile_keys: keys of a tile.
        header: [2] tiles of all items, and of a range.
        range_items: [num_ranges] the item in which each range begins.
        items: [items * ITEM_FIELDS].
        tokens: query rows, those of each item together.
        partial_starts: [num_tokens + 1] entries of `partial_rows` of each token.
        partial_rows: partial results, grouped by token.
    """

    num_tokens: int
    num_partials: int
    num_ranges: int
    tile_keys: int
    header: torch.Tensor
    range_items: torch.Tensor
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


def schedule_items(
    items: Sequence[DecodeItem],
    num_tokens: int,
    group: int,
    block_size: int,
    tile_keys: int,
    num_ranges: int,
) -> ItemLists:
    """Divide items into equal ranges.

    Args:
        items: at most `2 * (PRODUCT_ROWS // group)` tokens each.
        num_tokens: query tokens of the batch.
        group: query heads per KV head.
        block_size: N.
        tile_keys: keys of a tile.
        num_ranges: ranges, at least 1.
    """
    tiles = [-(-item.keys // tile_keys) for item in items]
    total = sum(tiles)
    per_range = max(1, -(-total // num_ranges))
    fields: list[int] = []
    tokens: list[int] = []
    of_token: list[list[int]] = [[] for _ in range(num_tokens)]
    range_items: list[int] = []
    before = partials = 0
    for number, (item, count) in enumerate(zip(items, tiles, strict=True)):
        members = len(item.tokens)
        first = len(tokens) if members > 1 else item.tokens[0]
        fields += (
            before, count, item.request, item.start // block_size, item.keys, first, members,
            partials,
        )  # fmt: skip
        if members > 1:
            tokens += item.tokens
        splits = (before + count - 1) // per_range - before // per_range + 1
        if count > WHOLE_TILES and members <= PRODUCT_ROWS // group:
            splits *= 2
        for _ in range(splits):
            for token in item.tokens:
                of_token[token].append(partials)
                partials += 1
        before += count
        while len(range_items) * per_range < before and len(range_items) < num_ranges:
            range_items.append(number)
    range_items += [0] * (num_ranges - len(range_items))  # ranges without tiles
    starts = [0]
    for rows in of_token:
        starts.append(starts[-1] + len(rows))
    entries = [row for rows in of_token for row in rows]
    lists = [total, per_range], range_items, fields, tokens, starts, entries
    return ItemLists(lists, num_tokens, partials, num_ranges, tile_keys)
