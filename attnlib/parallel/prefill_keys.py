"""The sequences of keys in the scratch cache that one step of a divided prefill attends to (X10).

A step has the keys of all ranks, in the order of their positions, or those of one rank, in the
order of its local indices: its context first, then its new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.parallel.prompts import Prompts, Segment, visible_keys

__all__ = ["StepKeys", "all_keys", "keys_of_rank", "padded", "taken"]


class StepKeys(NamedTuple):
    """Sequences of one step, one per prompt, and the rows that are copied into them.

    Attributes:
        lengths: keys of each sequence, with those before the first visible one.
        hidden: blocks at the beginning of each sequence that no token sees and no memory holds.
        new, context: `[rows, 2]` int64, sequence and index in it of each received row of new keys,
            and of context; -1 for padding.
        seen: keys of its sequence that each segment of the rank sees.
        is_causal: whether they end with the keys of the segment.
    """

    lengths: list[int]
    hidden: list[int]
    new: Tensor
    context: Tensor
    seen: list[int]
    is_causal: bool

    def first_blocks(self, block_size: int) -> Tensor:
        """`[R + 1]` int64, the first block of each sequence in the scratch cache, and their sum."""
        blocks = [
            max(0, -(-length // block_size) - hidden)
            for length, hidden in zip(self.lengths, self.hidden, strict=True)
        ]
        return torch.tensor([0, *accumulate(blocks)], device="cpu")

    def slots(self, rows: Tensor, block_size: int, padding: int) -> Tensor:
        """`[rows]` int64, where received rows are stored.

        Args:
            rows: `new` or `context`.
            block_size: N.
            padding: slot of rows of padding.
        """
        first = self.first_blocks(block_size)
        first = first[:-1] - first.new_tensor(self.hidden)
        return torch.where(rows[:, 0] < 0, padding, taken(first, rows) * block_size + rows[:, 1])

    def block_table(self, segments: Sequence[Segment], block_size: int) -> Tensor:
        """`[segments, columns]` int32. Columns that no token sees have the first block."""
        first = self.first_blocks(block_size)
        hidden, longest = first.new_tensor(self.hidden), max(self.lengths, default=0)
        columns = torch.arange(max(1, -(-longest // block_size)), device="cpu")
        table = first[:-1, None] + (columns - hidden[:, None]).clamp(min=0)
        table = table.clamp(max=max(0, int(first[-1]) - 1))
        return table[[segment.request for segment in segments]].int()


def all_keys(prompts: Prompts, new: Tensor, held: Tensor, rank: int, block_size: int) -> StepKeys:
    """The keys of all ranks: the segments of a rank see the prompt up to their ends.

    Args:
        prompts: of the batch.
        new: `[world_size, rows, 2]`, the rows of new keys of all ranks (`Prompts.tokens`).
        held: `[world_size, rows, 2]`, those of context (`Prompts.context`).
        rank: of the queries.
        block_size: N.
    """
    contexts = torch.tensor(prompts.contexts, dtype=torch.int64, device="cpu")
    rows = new.flatten(0, 1)
    at = [prompts.cache.position(held[each, :, 1], each) for each in range(prompts.world_size)]
    return StepKeys(
        lengths=_where_new(prompts, [a + b for a, b in _both(prompts.contexts, prompts.lengths)]),
        hidden=_where_new(prompts, [first // block_size for first in prompts.firsts]),
        new=torch.stack((rows[:, 0], taken(contexts, rows) + rows[:, 1]), 1),
        context=torch.stack((held[..., 0], torch.stack(at)), 2).flatten(0, 1),
        seen=[prompts.contexts[s.request] + s.end for s in prompts.segments(rank)],
        is_causal=True,
    )


def keys_of_rank(prompts: Prompts, new: Tensor, held: Tensor, rank: int, owner: int) -> StepKeys:
    """The keys of the rank `owner`; other arguments as in `all_keys`, of layers whose tokens see
    the whole context."""
    contexts, counts = prompts.context_counts(owner), prompts.new_counts(owner)
    starts, rows = [0, *accumulate(counts)][:-1], new[owner]
    before = [context - start for context, start in zip(contexts, starts, strict=True)]
    first = torch.tensor(before, dtype=torch.int64, device="cpu")
    index = taken(first, rows) + torch.arange(len(rows), device="cpu")
    segments = list(prompts.segments(rank))
    return StepKeys(
        lengths=_where_new(prompts, [a + b for a, b in _both(contexts, counts)]),
        hidden=[0] * len(counts),
        new=torch.stack((rows[:, 0], index), 1),
        context=held[owner],
        seen=[
            contexts[s.request] + visible_keys(prompts.divisions[s.request], s, owner, rank)
            for s in segments
        ],
        is_causal=owner == rank,
    )


def padded(parts: Sequence[Tensor]) -> Tensor:
    """`[ranks, rows, 2]` of the pairs `[n, 2]` of each rank, with -1 in rows past them."""
    found = parts[0].new_full((len(parts), max(map(len, parts)), 2), -1)
    for each, part in zip(found, parts, strict=True):
        each[: len(part)] = part
    return found


def taken(values: Tensor, rows: Tensor) -> Tensor:
    """The values `[R]` of the prompts of pairs `[..., 2]`; anything for padding."""
    if not len(values):
        return torch.zeros_like(rows[..., 0])
    return values[rows[..., 0].clamp(min=0)]


def _both(first: list[int], second: list[int]) -> zip[tuple[int, int]]:
    return zip(first, second, strict=True)


def _where_new(prompts: Prompts, values: list[int]) -> list[int]:
    """The values of prompts with new tokens; 0 for others."""
    return [value if length else 0 for value, length in _both(values, prompts.lengths)]
