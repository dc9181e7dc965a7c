"""The query rows of parts of prefixes, as lists on the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from attnlib.backends.cascade.schedule import PrefixPart

__all__ = ["PartRows"]


class PartRows(NamedTuple):
    """Each query row once for each part of its prefixes: P rows.

    Attributes:
        rows: `[P]` the row of the batch's queries that each row repeats.
        part_starts: `[parts + 1]` where the rows of each part start.
        partial_starts: `[T + 1]` token t has entries `[starts[t], starts[t + 1])`.
        partial_rows: `[P]` rows of this list, grouped by token.
    """

    rows: list[int]
    part_starts: list[int]
    partial_starts: list[int]
    partial_rows: list[int]

    @classmethod
    def of(cls, parts: Sequence[PrefixPart], starts: Sequence[int], num_tokens: int) -> PartRows:
        """The rows of these parts.

        Args:
            parts: of the prefixes.
            starts: `[R + 1]` where each request's query tokens start.
            num_tokens: T, query tokens of the batch.
        """
        rows: list[int] = []
        part_starts = [0]
        of_token: list[list[int]] = [[] for _ in range(num_tokens)]
        for part in parts:
            for request in part.requests:
                for token in range(starts[request], starts[request + 1]):
                    of_token[token].append(len(rows))
                    rows.append(token)
            part_starts.append(len(rows))
        partial_starts = list(accumulate(map(len, of_token), initial=0))
        partial_rows = [row for entries in of_token for row in entries]
        return cls(rows, part_starts, partial_starts, partial_rows)
