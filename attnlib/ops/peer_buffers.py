"""The buffers by which the GPUs of one host exchange the states of a divided layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["MERGED_WORDS", "PeerBuffers", "ShareTile"]

_SLOTS = 8192
"""Programs times ranks of the largest exchange of queries, and of results."""
_SHARED_WORDS, MERGED_WORDS = 128, 256
"""Words that a program shares with a rank, and of the largest head that a program merges."""
_RANKS = 1024
"""More than a host has GPUs."""


class PeerBuffers(NamedTuple):
    """Views of this rank's buffer, which the other ranks write at the same offsets.

    Attributes:
        rank: of this process.
        distances: `[world_size]` int64, bytes from this rank's buffer to that of each rank.
        shared, merged, merged_lses: int64, words that this rank receives, of queries, of results
            and of LSEs; fixed ones for each program and rank, and for odd and even exchanges.
        share_counts, merge_counts: int32 of each program, how often it ran on this rank.
        owners: what keeps the memory of all ranks.
    """

    rank: int
    distances: Tensor
    shared: Tensor
    merged: Tensor
    merged_lses: Tensor
    share_counts: Tensor
    merge_counts: Tensor
    owners: tuple[Any, ...]

    @staticmethod
    def num_bytes() -> int:
        """Of the buffer of a rank."""
        return sum(_sizes())

    @classmethod
    def of(cls, buffers: Sequence[Tensor], rank: int, *owners: Any) -> PeerBuffers:
        """Views of buffers of zeros.

        Args:
            buffers: `[num_bytes]` uint8 of each rank, as this process addresses them.
            rank: of this process.
            owners: further objects that keep the memory.
        """
        own = buffers[rank]
        distances = [each.data_ptr() - own.data_ptr() for each in buffers]
        # All in this memory: an engine may take that of torch's allocator away while it sleeps.
        *words, to_each = (part.view(torch.int64) for part in torch.split(own, _sizes()))
        shared, merged, lses, counts = words
        to_each = to_each[: len(buffers)]
        to_each.copy_(torch.tensor(distances, dtype=torch.int64, device="cpu"))
        runs = counts.view(torch.int32).view(2, _SLOTS)
        return cls(rank, to_each, shared, merged, lses, runs[0], runs[1], (*buffers, *owners))

    def fit(self, tokens: int, kv_heads: int, heads: int, sizes: tuple[int, int]) -> bool:
        """Whether an exchange fits.

        Args:
            tokens: of the batch.
            kv_heads, heads: of a rank.
            sizes: bytes of a query and of a result of one head.
        """
        size, size_v = sizes
        if size % 4 or size_v % 4 or size_v > 4 * MERGED_WORDS:
            return False
        shared = ShareTile.of(heads // kv_heads * size // 4).programs(tokens * kv_heads)
        return max(shared, tokens * heads) * len(self.distances) <= _SLOTS


class ShareTile(NamedTuple):
    """What a program shares.

    Attributes:
        rows, lanes: of words.
        size: words of a row.
    """

    rows: int
    lanes: int
    size: int

    @classmethod
    def of(cls, size: int) -> ShareTile:
        lanes = min(1 << (size - 1).bit_length(), _SHARED_WORDS)
        return cls(_SHARED_WORDS // lanes, lanes, size)

    def programs(self, rows: int) -> int:
        """For each rank."""
        return -(-rows // self.rows) * -(-self.size // self.lanes)


def _sizes() -> list[int]:
    words = [2 * _SLOTS * each for each in (_SHARED_WORDS, MERGED_WORDS, 1)]
    return [8 * each for each in (*words, _SLOTS, _RANKS)]
