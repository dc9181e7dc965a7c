"""Assign physical cache blocks to the requests of a batch.

A kernel that is correct for contiguous blocks may be wrong for scattered ones. A placement assigns
the blocks and builds the block table (P3). The table is exactly as wide as the longest request
needs or wider; entries past the end of a request are invalid. A guarded table lies between two
zones of block id 2^30, so that a read one column past its end is detected.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from attnlib.errors import ContractError
from attnlib.testing.batch_spec import BatchSpec

__all__ = [
    "PLACEMENTS",
    "GarbageKind",
    "BlockPlacement",
    "PlacementKind",
    "blocks_needed",
    "place_blocks",
]

PlacementKind = Literal["contiguous", "shuffled", "interleaved", "reversed", "shared_prefix", "top"]
GarbageKind = Literal["plausible", "minus_one", "huge"]
PLACEMENTS: tuple[str, ...] = get_args(PlacementKind)

_HUGE_BLOCK = 2**30
_GUARD_ENTRIES = 64


@dataclass(frozen=True)
class BlockPlacement:
    """The physical blocks of a batch.

    Attributes:
        blocks: per request, the physical block of each logical block.
        num_blocks: size of the pool, including unused blocks.
        block_table: [R, M] int32 on the CPU; entries past the blocks of a request are invalid.
    """

    blocks: tuple[tuple[int, ...], ...]
    num_blocks: int
    block_table: torch.Tensor

    def slots(self, request: int, start: int, stop: int, block_size: int) -> list[int]:
        """Slots (P4) of positions [start, stop) of one request."""
        row = self.blocks[request]
        return [row[p // block_size] * block_size + p % block_size for p in range(start, stop)]


def blocks_needed(seq_len: int, block_size: int) -> int:
    """ceil(seq_len / block_size)."""
    return -(-seq_len // block_size)


def place_blocks(
    batch: BatchSpec,
    block_size: int,
    kind: PlacementKind = "shuffled",
    *,
    seed: int = 0,
    spare_blocks: int = 3,
    extra_columns: int = 0,
    garbage: GarbageKind = "plausible",
    guarded: bool = False,
    hidden_columns: int = 0,
) -> BlockPlacement:
    """Assign blocks to the requests of a batch.

    Args:
        batch: the request lengths.
        block_size: N, tokens per block.
        kind: order of the blocks in the pool. "contiguous": request after request; "shuffled";
            "interleaved": round robin over requests; "reversed"; "shared_prefix": requests share
            the blocks that hold only context in every request; "top": reversed, at the end of a
            pool of four times the size.
        seed: seed of the shuffled orders.
        spare_blocks: blocks that belong to no request.
        extra_columns: columns beyond the width that the longest request needs.
        garbage: block table entries past the blocks of a request. "plausible": ids of other blocks
            in the pool; "minus_one": -1; "huge": 2^30.
        guarded: allocate the table between two zones of 2^30.
        hidden_columns: make the table a view of a wider one, whose other columns are 2^30.

    Raises:
        ContractError: the kind is unknown.
    """
    if kind not in PLACEMENTS:
        raise ContractError(
            f"no placement is named {kind!r}; the kinds are {', '.join(PLACEMENTS)}"
        )
    counts = [blocks_needed(seq_len, block_size) for seq_len in batch.seq_lens]
    shared = _shared_blocks(batch, block_size) if kind == "shared_prefix" else 0
    owned = _distribute(kind, [max(count - shared, 0) for count in counts], seed)
    used = sum(counts) - shared * max(len(counts) - 1, 0) if shared else sum(counts)
    base = 3 * used + spare_blocks if kind == "top" else 0
    prefix = list(range(used - shared, used))
    rows = [
        tuple(base + block for block in [*prefix[:count], *own_blocks])
        for own_blocks, count in zip(owned, counts, strict=True)
    ]
    num_blocks = base + used + (0 if kind == "top" else spare_blocks)
    table = _table(rows, num_blocks, extra_columns, garbage, guarded, hidden_columns)
    return BlockPlacement(tuple(rows), num_blocks, table)


def _shared_blocks(batch: BatchSpec, block_size: int) -> int:
    """Number of leading blocks that hold only context in every request (not written this step)."""
    contexts = [max(s - q, 0) for q, s in batch.lengths]
    return min((context // block_size for context in contexts), default=0)


def _distribute(kind: str, counts: Sequence[int], seed: int) -> list[list[int]]:
    """Distribute blocks 0, 1, ... over the requests; request r gets counts[r] blocks."""
    order = [request for request, count in enumerate(counts) for _ in range(count)]
    if kind == "interleaved":
        order = [
            r
            for turn in range(max(counts, default=0))
            for r, count in enumerate(counts)
            if turn < count
        ]
    blocks = list(range(len(order)))
    if kind in ("shuffled", "shared_prefix"):
        random.Random(seed).shuffle(blocks)
    elif kind in ("reversed", "top"):  # the last slot of the pool is context
        blocks.reverse()
    owned: list[list[int]] = [[] for _ in counts]
    for request, block in zip(order, blocks, strict=True):
        owned[request].append(block)
    return owned


def _table(
    rows: Sequence[Sequence[int]],
    num_blocks: int,
    extra_columns: int,
    garbage: GarbageKind,
    guarded: bool,
    hidden_columns: int,
) -> torch.Tensor:
    width = max((len(row) for row in rows), default=0) + extra_columns
    guard = _GUARD_ENTRIES if guarded else 0
    size = len(rows) * (width + hidden_columns)
    storage = torch.full((size + 2 * guard,), _HUGE_BLOCK, dtype=torch.int32)
    table = storage[guard : guard + size].view(len(rows), width + hidden_columns)[:, :width]
    for request, row in enumerate(rows):
        unused = range(len(row), width)
        if garbage == "plausible" and unused:
            own = set(row)
            other = [block for block in range(num_blocks) if block not in own] or [0]
            rest = [other[(request + column) % len(other)] for column in unused]
        else:
            rest = [-1 if garbage == "minus_one" else _HUGE_BLOCK] * len(unused)
        table[request] = torch.tensor([*row, *rest], dtype=torch.int32)
    return table
