"""A batch as sequences for functions that return the last state of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlib.ops.states import StateBatch, StateLayout, StateTensors
from attnlib.ops.states.batch import StateRequest
from attnlib.ops.states.checks import check_slots

__all__ = ["PackedBatch", "PackedStep"]


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The N sequences of one call: tokens of requests whose final states are stored.

    Attributes:
        rows: their rows of the inputs, one after the other: a slice if these are the first ones,
            else int64.
        starts, starts_cpu: `[N + 1]` int64; where each sequence begins in `rows`.
        longest: the most tokens of a sequence.
        requests: `[N]` int64; the request of each sequence, of those with new tokens.
        slots, numbers: `[N]` int64; where its final state is stored.
        written: rows of the output, and the tokens of the call whose outputs they become; of the
            sequences of a request, those of the longest.
    """

    rows: Tensor | slice
    starts: Tensor
    starts_cpu: Tensor
    longest: int
    requests: Tensor
    slots: Tensor
    numbers: Tensor
    written: tuple[Tensor | slice, Tensor | slice]


@dataclass(frozen=True, eq=False)
class PackedStep:
    """The requests of a batch that have new tokens and a slot, R of them.

    Attributes:
        sources, numbers: `[R]` int64; the states to begin with.
        fresh: `[R, 1, 1, 1]` bool; requests that begin with this step, whose slot is not read.
        slots: `[R]` int64; to write.
        copied: requests whose first state is kept, in another slot than it is in.
        positions: `[R, 1, 1, 2]` int32; (low, high) after the step.
        calls: one, or two with `snapshots`: up to the first position that is kept, and from there a
            sequence for each later one.
    """

    sources: Tensor
    numbers: Tensor
    fresh: Tensor
    slots: Tensor
    copied: Tensor
    positions: Tensor
    calls: tuple[PackedBatch, ...]

    @classmethod
    def of(cls, batch: StateBatch, tensors: StateTensors) -> PackedStep | None:
        """The step of a batch, or None without such requests. Synchronizes.

        Raises:
            ContractError: as `check_slots`.
        """
        requests, device, layout = list(batch.requests()), batch.slots.device, tensors.layout
        check_slots(requests, tensors.valid)
        if not requests:
            return None
        kept = [layout.first_kept(r.computed, r.end) for r in requests]
        ahead, each = [], []
        for number, (r, low) in enumerate(zip(requests, kept, strict=True)):
            # One call for a few tokens, although the first ones are computed again and again.
            is_short = r.end - r.computed <= layout.num_states and layout.num_states > 1
            base = r.computed if is_short else low
            if base > r.computed:
                ahead.append((number, r.computed, base))
            each += [(number, base, end) for end in range(max(low, base + 1), r.end + 1)]
        calls = (_packed(part, requests, layout, device) for part in (ahead, each) if part)
        copied = [
            n
            for n, (r, low) in enumerate(zip(requests, kept, strict=True))
            if low == r.computed and r.is_fork
        ]
        pairs = [[low, r.end] for r, low in zip(requests, kept, strict=True)]
        return cls(
            sources=_int64([r.source for r in requests], device),
            numbers=_int64([r.computed % layout.num_states for r in requests], device),
            fresh=_int64([r.computed == 0 for r in requests], device).bool().view(-1, 1, 1, 1),
            slots=_int64([r.slot for r in requests], device),
            copied=_int64(copied, device),
            positions=_int64(pairs, device).int().view(-1, 1, 1, 2),
            calls=tuple(calls),
        )


def _int64(values: Sequence[Any], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _packed(
    parts: list[tuple[int, int, int]],
    requests: list[StateRequest],
    layout: StateLayout,
    device: torch.device,
) -> PackedBatch:
    """The call for parts of requests: (number, first position, position behind the last)."""
    lengths = [end - first for _, first, end in parts]
    starts = torch.tensor([0, *lengths], device="cpu").cumsum(0)
    begins = [requests[n].start + first - requests[n].computed for n, first, _ in parts]
    rows: Tensor | slice = slice(0, sum(lengths))
    if begins != starts[:-1].tolist():
        rows = _ranges(begins, lengths, device)
    written: tuple[Tensor | slice, Tensor | slice] = rows, slice(None)
    longest = {number: place for place, (number, *_) in enumerate(parts)}  # the last of each
    if len(longest) < len(parts):
        chosen = list(longest.values())
        counts, places = [lengths[p] for p in chosen], [int(starts[p]) for p in chosen]
        to_rows = _ranges([begins[p] for p in chosen], counts, device)
        written = to_rows, _ranges(places, counts, device)
    return PackedBatch(
        rows=rows,
        starts=starts.to(device),
        starts_cpu=starts,
        longest=max(lengths),
        requests=_int64([n for n, *_ in parts], device),
        slots=_int64([requests[n].slot for n, *_ in parts], device),
        numbers=_int64([end % layout.num_states for *_, end in parts], device),
        written=written,
    )


def _ranges(begins: list[int], lengths: list[int], device: torch.device) -> Tensor:
    parts = zip(begins, lengths, strict=True)
    numbers = [torch.arange(b, b + n, device="cpu") for b, n in parts]
    return torch.cat(numbers).to(device)
