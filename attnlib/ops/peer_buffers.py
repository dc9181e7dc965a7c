"""The buffers by which the GPUs of one host exchange the states of a divided layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["PeerBuffers"]

_BYTES = 4 << 20
"""Of the queries of all ranks, and of the results that a rank receives."""
_PROGRAMS = 8192
"""Of the largest exchange, for each rank."""


class PeerBuffers(NamedTuple):
    """Views of this rank's buffer, which the other ranks write at the same offsets.

    Attributes:
        rank: of this process.
        distances: `[world_size]` int64, bytes from this rank's buffer to that of each rank.
        share_counts, merge_counts: int32 of each program, how often it ran on this rank.
        share_flags, merge_flags: `[world_size, n]` int32, how often each program has run on the
            other ranks, which set them.
        shared, received: uint8, for the queries of all ranks and for partial states.
        owners: what keeps the memory of all ranks.
    """

    rank: int
    distances: Tensor
    share_counts: Tensor
    merge_counts: Tensor
    share_flags: Tensor
    merge_flags: Tensor
    shared: Tensor
    received: Tensor
    owners: tuple[Any, ...]

    @staticmethod
    def num_bytes(world_size: int) -> int:
        """Of the buffer of a rank."""
        return 2 * world_size * _PROGRAMS * 4 + 2 * _BYTES

    @classmethod
    def of(cls, buffers: Sequence[Tensor], rank: int, *owners: Any) -> PeerBuffers:
        """Views of buffers of zeros.

        Args:
            buffers: `[num_bytes]` uint8 of each rank, as this process addresses them.
            rank: of this process.
            owners: further objects that keep the memory.
        """
        own, world = buffers[rank], len(buffers)
        distances = [each.data_ptr() - own.data_ptr() for each in buffers]
        sizes = [world * _PROGRAMS * 4] * 2 + [_BYTES] * 2
        share_flags, merge_flags, shared, received = torch.split(own, sizes)
        return cls(
            rank=rank,
            distances=torch.tensor(distances, dtype=torch.int64, device=own.device),
            share_counts=torch.zeros(world * _PROGRAMS, dtype=torch.int32, device=own.device),
            merge_counts=torch.zeros(_PROGRAMS, dtype=torch.int32, device=own.device),
            share_flags=share_flags.view(torch.int32).view(world, _PROGRAMS),
            merge_flags=merge_flags.view(torch.int32).view(world, _PROGRAMS),
            shared=shared,
            received=received,
            owners=(*buffers, *owners),
        )

    def fit(self, heads: int, head_bytes: int) -> bool:
        """Whether an exchange fits.

        Args:
            heads: of all tokens on one rank.
            head_bytes: of a query, or of a result and its LSE.
        """
        # A program has at least one head, or 2048 elements; some have the rest of a KV head.
        return len(self.distances) * heads * head_bytes + 16 <= _BYTES and 2 * heads <= _PROGRAMS
