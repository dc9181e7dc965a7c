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

__all__ = ["ITEM_FIELDS", "PRODUCT_ROWS", "DecodeItem", "DecodeItems", "schedule_items"]

ITEM_FIELDS = 8
"""Integers of an item on the device: tiles before it, its tiles, row and first column of the block
table, keys, first entry of `tokens`, number of tokens, first partial row."""

PRODUCT_ROWS = 64
"""Query rows of one matrix product."""


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

    An item of at most `PRODUCT_ROWS` query rows per KV head is computed by two consumers in turn,
    tile by tile; each split then has two partial results of every token. Of other items each
    consumer computes all tiles for half of the tokens.

    Attributes:
        num_tokens: query tokens with a request, the first rows of the queries.
        num_partials: P, rows of partial results.
        num_ranges: ranges of the tiles.
        tile_keys: keys of a tile.
        header: [2] tiles of all items, and of a range.
        range_items: [num_ranges] the item in which each range begins.
        items: [items, ITEM_FIELDS].
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


def schedule_items(
    items: Sequence[DecodeItem],
    num_tokens: int,
    group: int,
    block_size: int,
    tile_keys: int,
    num_ranges: int,
    device: torch.device,
) -> DecodeItems:
    """Divide items into equal ranges. One copy takes all integers to the device.

    Args:
        items: at most `2 * (PRODUCT_ROWS // group)` tokens each.
        num_tokens: query tokens of the batch.
        group: query heads per KV head.
        block_size: N.
        tile_keys: keys of a tile.
        num_ranges: ranges, at least 1.
        device: of the result.
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
        fields += (
            before, count, item.request, item.start // block_size, item.keys, len(tokens), members,
            partials,
        )  # fmt: skip
        tokens += item.tokens
        splits = (before + count - 1) // per_range - before // per_range + 1
        if members <= PRODUCT_ROWS // group:
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
    lists = (
        [total, per_range], range_items, fields, tokens, starts,
        [row for rows in of_token for row in rows],
    )  # fmt: skip
    header, first, packed, members_, starts_, rows_ = _to_device(lists, device)
    return DecodeItems(
        num_tokens=num_tokens,
        num_partials=partials,
        num_ranges=num_ranges,
        tile_keys=tile_keys,
        header=header,
        range_items=first,
        items=packed.view(-1, ITEM_FIELDS),
        tokens=members_,
        partial_starts=starts_,
        partial_rows=rows_,
    )


def _to_device(lists: Sequence[list[int]], device: torch.device) -> list[torch.Tensor]:
    """Lists of integers as int32 tensors on the device, by one copy. Each begins at a multiple of
    16 bytes."""
    values: list[int] = []
    sizes: list[int] = []
    for numbers in lists:
        padding = -len(numbers) % 4
        values += [*numbers, *[0] * padding]
        sizes += [len(numbers), padding]
    packed = torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)
    return list(torch.split(packed, sizes)[::2])
