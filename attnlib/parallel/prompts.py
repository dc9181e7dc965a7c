"""Which tokens of prompts, and which keys, each rank has in a divided prefill (X10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from attnlib.parallel.divisions import ZigZag

__all__ = ["Prompts", "Segment", "visible_keys"]


class Segment(NamedTuple):
    """Consecutive tokens of a prompt on one rank.

    Attributes:
        request: of the batch.
        first, end: positions `[first, end)`.
    """

    request: int
    first: int
    end: int


def visible_keys(division: ZigZag, segment: Segment, owner: int, rank: int) -> int:
    """How many keys of a rank, in its order, the queries of a segment see; the last ones causally
    if the rank owns the segment."""
    if owner == rank:
        return int(division.local(segment.end - 1)) + 1
    return int(division.count(segment.first, owner))


class Prompts:
    """The division of the prompts of a batch.

    Args:
        lengths: of the prompts.
        world_size: ranks.
    """

    def __init__(self, lengths: Sequence[int], world_size: int) -> None:
        self.lengths, self.world_size = list(lengths), world_size
        self.divisions = [ZigZag.of_length(world_size, length) for length in lengths]
        self.starts = [0, *accumulate(self.lengths)]

    def segments(self, rank: int) -> Iterator[Segment]:
        """Those of a rank that have tokens, in the order of its tokens."""
        for request, division in enumerate(self.divisions):
            for first, end in division.segments(rank, self.lengths[request]):
                if end > first:
                    yield Segment(request, first, end)

    def tokens(self, rank: int) -> list[tuple[int, int]]:
        """(request, position) of the tokens of a rank."""
        return [(s.request, p) for s in self.segments(rank) for p in range(s.first, s.end)]

    def held(self, rank: int) -> list[int]:
        """Tokens of each prompt on a rank."""
        return [
            int(division.count(length, rank))
            for division, length in zip(self.divisions, self.lengths, strict=True)
        ]
