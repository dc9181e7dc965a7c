"""Trials of conversions between indices, the slot mapping and the block table."""

from __future__ import annotations

from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch

from attnlib.cache import indices as convert
from attnlib.cache.slots import compute_slot_mapping
from attnlib.cache.table import BlockTable
from tests.properties.corruptions.reading import blocks_of, ints, need, offsets, same, whole
from tests.properties.corruptions.trial import Trial

WIDTH = 3


def _batch(rng: Random) -> tuple[int, list[int], list[list[int]]]:
    """(block size, lengths, rows of a block table with `WIDTH` columns)."""
    size = rng.choice([1, 2, 4])
    lengths = [rng.randint(0, WIDTH * size) for _ in range(rng.randint(0, 3))]
    ids = rng.sample(range(12), 12)
    rows = [ids[WIDTH * i : WIDTH * i + WIDTH] for i in range(len(lengths))]
    return size, lengths, rows


def _tensor(rng: Random, values: list[Any], width: int | None = None) -> torch.Tensor:
    made = torch.tensor(values, dtype=rng.choice([torch.int32, torch.int64]))
    return made if width is None else made.view(-1, width)


def _slots_of(row: list[int], length: int, size: int) -> list[int]:
    used = blocks_of(row, length, size, None)
    return [used[p // size] * size + p % size for p in range(length)]


def tables(rng: Random) -> Trial:
    """A block table as page lists and as token slots."""
    size, lengths, rows = _batch(rng)

    def call(block_table: Any, seq_lens: Any, block_size: Any) -> Any:
        return (
            *convert.block_table_to_csr(block_table, seq_lens, block_size),
            convert.block_table_to_token_slots(block_table, seq_lens, block_size),
        )

    def reference(block_table: Any, seq_lens: Any, block_size: Any) -> Any:
        table, sizes, size = ints(block_table, 2), ints(seq_lens), whole(block_size, 1)
        need(len(table) == len(sizes), "other requests")
        pages = [blocks_of(row, n, size, None) for row, n in zip(table, sizes, strict=True)]
        flat, total = [p for row in pages for p in row], block_table.numel()
        last = [n - (len(p) - 1) * size if p else 0 for p, n in zip(pages, sizes, strict=True)]
        slots = [
            _slots_of(row, n, size) + [-1] * (block_table.shape[1] * size - n)
            for row, n in zip(table, sizes, strict=True)
        ]
        starts = [0, *accumulate(len(p) for p in pages)]
        return starts, flat + [-1] * (total - len(flat)), last, slots

    arguments = {
        "block_table": _tensor(rng, rows, WIDTH), "seq_lens": _tensor(rng, lengths),
        "block_size": size,
    }  # fmt: skip
    return Trial("block table conversions", arguments, {}, call, reference, same_result=same)


def pages(rng: Random) -> Trial:
    """Page lists as a block table, lengths and token slots."""
    size, lengths, rows = _batch(rng)
    used = [blocks_of(row, length, size, None) for row, length in zip(rows, lengths, strict=True)]
    last = [n - (len(p) - 1) * size if p else 0 for p, n in zip(used, lengths, strict=True)]

    def call(indptr: Any, indices: Any, last: Any, block_size: Any, max_blocks: Any) -> Any:
        return (
            convert.csr_to_block_table(indptr, indices, max_blocks),
            convert.csr_seq_lens(indptr, last, block_size),
            convert.csr_to_token_slots(indptr, indices, last, block_size, max_blocks * block_size),
        )

    def reference(indptr: Any, indices: Any, last: Any, block_size: Any, max_blocks: Any) -> Any:
        flat, size, width = ints(indices), whole(block_size, 1), whole(max_blocks)
        starts, ends = offsets(ints(indptr), len(flat)), ints(last)
        need(len(starts) == len(ends) + 1, "other requests")
        table, found, slots = [], [], []
        for (a, b), tokens in zip(pairwise(starts), ends, strict=True):
            need(b - a <= width and (a == b or 1 <= tokens <= size), "too long")
            length = (b - a - 1) * size + tokens if b > a else 0
            table.append(flat[a:b] + [-1] * (width - (b - a)))
            found.append(length)
            slots.append(_slots_of(flat[a:b], length, size) + [-1] * (width * size - length))
        return table, found, slots

    arguments = {
        "indptr": _tensor(rng, [0, *accumulate(len(p) for p in used)]),
        "indices": _tensor(rng, [p for row in used for p in row]),
        "last": _tensor(rng, last), "block_size": size, "max_blocks": WIDTH,
    }  # fmt: skip
    return Trial("page list conversions", arguments, {}, call, reference, same_result=same)


def token_slots(rng: Random) -> Trial:
    """Token slots as a block table, and as read and write indices."""
    size, lengths, rows = _batch(rng)
    width = WIDTH * size
    values = [
        _slots_of(row, length, size) + [rng.choice([-1, 5])] * (width - length)
        for row, length in zip(rows, lengths, strict=True)
    ]
    new = [rng.randint(0, length) for length in lengths]

    def call(slots: Any, seq_lens: Any, starts: Any, block_size: Any, num_tokens: Any) -> Any:
        read = convert.token_slots_to_read_indices(slots, seq_lens)
        return (
            convert.token_slots_to_block_table(slots, seq_lens, block_size),
            *read,
            convert.token_slots_to_write_indices(slots, starts, seq_lens, num_tokens),
        )

    def reference(slots: Any, seq_lens: Any, starts: Any, block_size: Any, num_tokens: Any) -> Any:
        table, sizes, size = ints(slots, 2), ints(seq_lens), whole(block_size, 1)
        rows, total = offsets(ints(starts), whole(num_tokens)), whole(num_tokens)
        need(len(table) == len(sizes) == len(rows) - 1, "other requests")
        blocks, read, written = [], [], [-1] * total
        for row, length, (a, b) in zip(table, sizes, pairwise(rows), strict=True):
            need(0 <= length <= len(row) and length >= b - a, "an impossible length")
            need(all(slot >= 0 for slot in row[:length]), "no slot")
            for position in range(length):
                first = row[position // size * size]
                need(first % size == 0 and row[position] == first + position % size, "no block")
            count = -(-slots.shape[1] // size)
            blocks.append([
                row[i * size] // size if i * size < length else -1 for i in range(count)
            ])  # fmt: skip
            read += row[:length]
            written[a:b] = row[length - (b - a) : length]
        padding = [-1] * (slots.numel() - len(read))
        return blocks, read + padding, [0, *accumulate(sizes)], written

    arguments = {
        "slots": _tensor(rng, values, width), "seq_lens": _tensor(rng, lengths),
        "starts": _tensor(rng, [0, *accumulate(new)]), "block_size": size,
        "num_tokens": sum(new) + rng.choice([0, 2]),
    }  # fmt: skip
    return Trial("token slot conversions", arguments, {}, call, reference, same_result=same)


def slot_mapping(rng: Random) -> Trial:
    """`compute_slot_mapping`."""
    size, lengths, rows = _batch(rng)
    new = [rng.randint(0, length) for length in lengths]

    def reference(
        query_start_loc: Any, seq_lens: Any, block_table: Any, block_size: Any, num_tokens: Any
    ) -> Any:
        table, sizes, size = ints(block_table, 2), ints(seq_lens), whole(block_size, 1)
        total = whole(num_tokens)
        starts = offsets(ints(query_start_loc), total)
        need(len(table) == len(sizes) == len(starts) - 1, "other requests")
        found = [-1] * total
        for row, length, (a, b) in zip(table, sizes, pairwise(starts), strict=True):
            need(length >= b - a, "more new tokens than tokens")
            found[a:b] = _slots_of(row, length, size)[length - (b - a) :]
        return found

    arguments = {
        "query_start_loc": _tensor(rng, [0, *accumulate(new)]),
        "seq_lens": _tensor(rng, lengths), "block_table": _tensor(rng, rows, WIDTH),
        "block_size": size, "num_tokens": sum(new) + rng.choice([0, 2]),
    }  # fmt: skip
    return Trial("compute_slot_mapping", arguments, {}, compute_slot_mapping, reference,
                 same_result=same)  # fmt: skip


def block_table(rng: Random) -> Trial:
    """Rows of a `BlockTable`."""
    first = rng.sample(range(12), rng.randint(0, 2))
    more = rng.sample(range(12), rng.randint(0, 2))

    def call(first: Any, more: Any, row: Any, count: Any) -> Any:
        table = BlockTable(2, 4)
        table.add_row(first, row)
        table.append_row(more, row)
        return table.commit(count)

    def reference(first: Any, more: Any, row: Any, count: Any) -> Any:
        for block in [*first, *more]:
            need(isinstance(block, int) and not isinstance(block, bool), "no integer")
            need(0 <= block < 2**31, "no block")
        need(whole(row) < 2 and whole(count) <= 2 and len(first) + len(more) <= 4, "no room")
        rows = [[-1] * 4, [-1] * 4]
        rows[row] = [*first, *more] + [-1] * (4 - len(first) - len(more))
        return rows[:count]

    arguments = {"first": first, "more": more, "row": rng.randrange(2), "count": rng.randint(0, 2)}
    return Trial("BlockTable", arguments, {}, call, reference, same_result=same)


TRIALS = (tables, pages, token_slots, slot_mapping, block_table)
