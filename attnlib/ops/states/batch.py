"""`StateBatch`, one step of a batch over slots."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["StateBatch", "StateRequest", "step_requests"]


class StateRequest(NamedTuple):
    """One request with new tokens and a slot.

    Attributes:
        number: its place in the batch.
        start: its first row.
        computed: tokens before the step (n, T1).
        end: tokens after it.
        source: the slot to read; `slot` where `computed` is 0.
        slot: the slot to write.
    """

    number: int
    start: int
    computed: int
    end: int
    source: int
    slot: int

    @property
    def rows(self) -> slice:
        """Its rows of the inputs and outputs."""
        return slice(self.start, self.start + self.end - self.computed)

    @property
    def is_fork(self) -> bool:
        """Whether it reads a slot that it does not write (T12)."""
        return self.computed > 0 and self.source != self.slot


@dataclass(frozen=True, eq=False, kw_only=True)
class StateBatch:
    """Lengths and slots of R requests.

    Attributes:
        query_start_loc: `[R + 1]` int32 device; the first row of each request, then T.
        seq_lens: `[R]` int32 device; tokens of each request after the step. Not read for requests
            without new tokens.
        slots: `[R]` int32 device; the slot of each request, -1 for none (T7).
        sources: `[R]` int32 device; the slot to read (T12). None reads `slots`.
        max_query_len: an upper bound on the new tokens of a request.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    slots: Tensor
    sources: Tensor | None = None
    max_query_len: int

    @property
    def num_reqs(self) -> int:
        """R."""
        return self.slots.shape[0]

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """What kernels read, contiguous: first rows, lengths, slots, and the slots to read."""
        sources = self.slots if self.sources is None else self.sources
        given = (self.query_start_loc, self.seq_lens, self.slots, sources)
        return tuple(x.contiguous() for x in given)

    def requests(self) -> Iterator[StateRequest]:
        """The requests with new tokens and a slot. Synchronizes; lengths on the host may be upper
        bounds, and tensors may have changed in place."""
        slots = self.slots.tolist()
        sources = slots if self.sources is None else self.sources.tolist()
        counts = self.query_start_loc.diff().tolist()
        return step_requests(counts, self.seq_lens.tolist(), slots, sources)


def step_requests(
    counts: Iterable[int], ends: Iterable[int], slots: Iterable[int], sources: Iterable[int]
) -> Iterator[StateRequest]:
    """The requests with new tokens and a slot; the others write nothing (T11).

    Args:
        counts, ends: new tokens, and tokens after the step, of each request of a batch.
        slots, sources: to write and to read.
    """
    start = 0
    given = zip(counts, ends, slots, sources, strict=False)
    for number, (count, end, slot, source) in enumerate(given):
        if slot != -1 and count > 0:
            read = source if end > count else slot  # first steps read none
            yield StateRequest(number, start, end - count, end, read, slot)
        start += count
