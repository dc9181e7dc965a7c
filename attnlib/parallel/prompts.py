"""Which tokens of prompts, and which keys, each rank has in a divided prefill (X10)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.parallel.divisions import Division, ZigZag
from attnlib.spec import AttentionSpec

__all__ = ["Prompts", "Segment", "visible_keys"]


class Segment(NamedTuple):
    """Consecutive new tokens of a prompt on one rank.

    Attributes:
        request: of the batch.
        first, end: new tokens `[first, end)` of the prompt.
    """

    request: int
    first: int
    end: int


def visible_keys(division: ZigZag, segment: Segment, owner: int, rank: int) -> int:
    """How many new keys of a rank, in its order, the queries of a segment see; the last ones
    causally if the rank owns the segment."""
    if owner == rank:
        return int(division.local(segment.end - 1)) + 1
    return int(division.count(segment.first, owner))


class Prompts:
    """The division of the prompts of a batch: new tokens by a zigzag of each prompt, the context
    by the division of the cache.

    Args:
        spec: of the layer.
        division: of the cache.
        lengths: new tokens of each prompt.
        contexts: tokens of each prompt in the cache.

    Attributes:
        firsts: position of the first context token that new tokens may see, at the beginning of a
            block.
        starts: of each prompt in the packed new tokens.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        division: Division,
        lengths: Sequence[int],
        contexts: Sequence[int],
    ) -> None:
        self.cache, self.world_size = division, division.world_size
        self.lengths, self.contexts = list(lengths), list(contexts)
        self.divisions = [ZigZag.of_length(self.world_size, length) for length in lengths]
        self.starts = [0, *accumulate(self.lengths)]
        self.firsts = [
            _first_visible(spec, context)
            if length
            else context // spec.block_size * spec.block_size
            for length, context in zip(lengths, contexts, strict=True)
        ]

    def segments(self, rank: int) -> Iterator[Segment]:
        """Those of a rank that have tokens, in the order of its tokens."""
        for request, division in enumerate(self.divisions):
            for first, end in division.segments(rank, self.lengths[request]):
                if end > first:
                    yield Segment(request, first, end)

    def tokens(self, rank: int) -> Tensor:
        """`[n, 2]` int64: prompt and index among its new tokens, of the new tokens of a rank."""
        return _pairs(self.segments(rank))

    def context(self, rank: int) -> Tensor:
        """`[n, 2]` int64: prompt and local index of the context tokens of a rank that new tokens
        may see."""
        count = self.cache.count
        return _pairs(
            (request, count(first, rank), count(context, rank))
            for request, (first, context) in enumerate(zip(self.firsts, self.contexts, strict=True))
            if self.lengths[request]
        )

    def context_counts(self, rank: int) -> list[int]:
        """Context tokens of each prompt on a rank, from the first position on."""
        return [int(self.cache.count(context, rank)) for context in self.contexts]

    def new_counts(self, rank: int) -> list[int]:
        """New tokens of each prompt on a rank."""
        return [
            int(division.count(length, rank))
            for division, length in zip(self.divisions, self.lengths, strict=True)
        ]


def _first_visible(spec: AttentionSpec, context: int) -> int:
    """The first position that a token at position `context` or later sees, at a block."""
    before, chunk, first = spec.visible_window.left, spec.attention_chunk_size, 0
    if before is not None:
        first = max(0, context - before)
    if chunk:
        first = max(first, context // chunk * chunk)
    return first // spec.block_size * spec.block_size


def _pairs(ranges: Iterable[tuple[int, int, int]]) -> Tensor:
    """`[n, 2]` of (request, index) for ranges of indices `(request, first, end)`."""
    parts = [
        (request, torch.arange(first, end, device="cpu"))
        for request, first, end in ranges
        if end > first
    ]
    pairs = [torch.stack((torch.full_like(each, request), each), 1) for request, each in parts]
    return torch.cat(pairs) if pairs else torch.empty(0, 2, dtype=torch.int64, device="cpu")
