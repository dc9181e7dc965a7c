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
from dataclasses import dataclass
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
        packed = torch.tensor(self.packed(sizes), dtype=torch.int32, device="cpu")
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
