"""States over disjoint keys in one buffer, and their merge: once per key, once per sink (X5).

A row of the buffer holds the outputs of a token's heads, then their LSEs in float32, so that one
exchange moves both. The rows of all ranks, in the order of the ranks, and one row for the sinks are
merged by one operation; its bits depend on nothing but the states of the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.ops.dispatch import operation

__all__ = ["KnownMergeRows", "MergeRows", "Parts"]

_KNOWN_TOKENS = 512
"""Of batches whose `MergeRows` are kept."""
_ALIGNMENT = 16
"""Bytes of which a row is a multiple, so that kernels load whole vectors."""


class Parts(NamedTuple):
    """States of tokens.

    Attributes:
        rows: `[n, row]`, the memory.
        outs: `[n, Hq, Dv]`, a view of it.
        lses: `[n, Hq]` float32, likewise.
    """

    rows: Tensor
    outs: Tensor
    lses: Tensor

    @classmethod
    def like(cls, shape: torch.Size, example: Tensor, *, has_sink: bool = False) -> Parts:
        """A buffer for `[ranks, T, Hq, Dv]` states, and one more row with `has_sink`, with the
        dtype and device of `example`."""
        ranks, tokens, heads, size = shape
        count, itemsize = ranks * tokens + has_sink, example.element_size()
        elements = heads * size
        start = -(-elements * itemsize // 4)  # of the LSEs, in float32
        num_bytes = -(-4 * (start + heads) // _ALIGNMENT) * _ALIGNMENT
        rows = example.new_empty(count, num_bytes // itemsize)
        outs = rows[:, :elements].view(count, heads, size)
        lses = rows.view(torch.float32)[:, start : start + heads]
        return cls(rows, outs, lses)

    def of_ranks(self, count: int) -> Tensor:
        """The memory of the first `count` rows."""
        return self.rows[:count]

    def set_sink(self, sinks: Tensor) -> None:
        """Make the last row the state of the sinks: no value, and a logit. +inf counts as NaN."""
        self.outs[-1].zero_()
        self.lses[-1].copy_(sinks)
        self.lses[-1].masked_fill_(self.lses[-1] == torch.inf, torch.nan)


class MergeRows(NamedTuple):
    """Which rows of `Parts` belong to each token.

    Attributes:
        starts: `[T + 1]` int32.
        rows: `[T * parts]` int32.
    """

    starts: Tensor
    rows: Tensor

    @classmethod
    def of(
        cls, world_size: int, num_tokens: int, has_sink: bool, device: torch.device
    ) -> MergeRows:
        """Those of a batch of `num_tokens` tokens."""
        token = torch.arange(num_tokens, dtype=torch.int32, device=device)
        rank = torch.arange(world_size, dtype=torch.int32, device=device)
        rows = token[:, None] + rank * num_tokens
        if has_sink:
            sink = torch.full_like(rows[:, :1], world_size * num_tokens)
            rows = torch.cat((rows, sink), 1)
        starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=device) * rows.shape[1]
        return cls(starts, rows.flatten())

    def merge(self, parts: Parts, output: Tensor, lse: Tensor) -> None:
        """Merge the parts of each token into `output` `[T, Hq, Dv]` and `lse` `[T, Hq]`."""
        merge = operation("merge_states", "merge_partial_rows", output)
        merge(output, lse, parts.outs, parts.lses, self.starts, self.rows)


class KnownMergeRows:
    """`MergeRows` by the number of tokens, from which they follow.

    Args:
        world_size: of the group.
        has_sink: of the layers.
    """

    def __init__(self, world_size: int, has_sink: bool) -> None:
        self._sizes, self._known = (world_size, has_sink), dict[int, MergeRows]()

    def of(self, num_tokens: int, device: torch.device, captures: bool) -> MergeRows:
        """Those of a batch; kept for a CUDA graph, if it `captures`, and where they are small."""
        found = self._known.get(num_tokens)
        if found is None:
            world_size, has_sink = self._sizes
            found = MergeRows.of(world_size, num_tokens, has_sink, device)
            if captures or num_tokens <= _KNOWN_TOKENS:
                self._known[num_tokens] = found
        return found
