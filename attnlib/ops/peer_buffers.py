"""The buffers by which the GPUs of one host exchange the states of a divided layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["MergeTile", "PeerBuffers", "ShareTile"]

_BYTES = 4 << 20
"""Of the queries of all ranks, and of the results that a rank receives."""
_PROGRAMS = 8192
"""Of the largest exchange, for each rank."""
_WORD_PROGRAMS = 1024
"""Of the largest exchange by words, of one for each pair of a program and a rank."""
SHARED_WORDS, MERGED_WORDS, MERGED_HEADS = 512, 512, 8
"""Words that a program shares with a rank; words of results, at least of a head of 1024 elements,
and heads, that a program merges."""


class PeerBuffers(NamedTuple):
    """Views of this rank's buffer, which the other ranks write at the same offsets.

    Attributes:
        rank: of this process.
        distances: `[world_size]` int64, bytes from this rank's buffer to that of each rank.
        share_counts, merge_counts: int32 of each program, how often it ran on this rank.
        share_flags, merge_flags: `[world_size, n]` int32, how often each program has run on the
            other ranks, which set them.
        shared, received: uint8, for the queries of all ranks and for partial states.
        words, merge_words, merge_lse_words: int64, of the programs that share and that merge.
        word_counts, merge_word_counts: as `share_counts`.
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
    words: Tensor
    merge_words: Tensor
    merge_lse_words: Tensor
    word_counts: Tensor
    merge_word_counts: Tensor
    owners: tuple[Any, ...]

    @staticmethod
    def num_bytes(world_size: int) -> int:
        """Of the buffer of a rank."""
        per_program = SHARED_WORDS + MERGED_WORDS + MERGED_HEADS
        return 2 * world_size * _PROGRAMS * 4 + 2 * _BYTES + 8 * _WORD_PROGRAMS * per_program

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
        sizes += [8 * _WORD_PROGRAMS * each for each in (SHARED_WORDS, MERGED_WORDS, MERGED_HEADS)]
        share_flags, merge_flags, shared, received, *words = torch.split(own, sizes)
        return cls(
            rank=rank,
            distances=torch.tensor(distances, dtype=torch.int64, device=own.device),
            share_counts=torch.zeros(world * _PROGRAMS, dtype=torch.int32, device=own.device),
            merge_counts=torch.zeros(_PROGRAMS, dtype=torch.int32, device=own.device),
            share_flags=share_flags.view(torch.int32).view(world, _PROGRAMS),
            merge_flags=merge_flags.view(torch.int32).view(world, _PROGRAMS),
            shared=shared,
            received=received,
            words=words[0].view(torch.int64),
            merge_words=words[1].view(torch.int64),
            merge_lse_words=words[2].view(torch.int64),
            word_counts=torch.zeros(_WORD_PROGRAMS, dtype=torch.int32, device=own.device),
            merge_word_counts=torch.zeros(_WORD_PROGRAMS, dtype=torch.int32, device=own.device),
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

    def fit_words(self, tokens: int, kv_heads: int, heads: int, sizes: tuple[int, int]) -> bool:
        """Whether an exchange by words fits.

        Args:
            tokens: of the batch.
            kv_heads, heads: of a rank.
            sizes: bytes of a query and of a result of one head.
        """
        size, size_v = sizes
        if size % 4 or size_v % 4 or size_v > 4 * MERGED_WORDS:
            return False
        shared = ShareTile.of(heads // kv_heads * size // 4).programs(tokens * kv_heads)
        merged = tokens * -(-heads // MergeTile.of(heads, size_v // 4).heads)
        return max(shared, merged) * len(self.distances) <= _WORD_PROGRAMS


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
        lanes = min(_power_of_2(size), SHARED_WORDS)
        return cls(SHARED_WORDS // lanes, lanes, size)

    def programs(self, rows: int) -> int:
        """For each rank."""
        return -(-rows // self.rows) * -(-self.size // self.lanes)


class MergeTile(NamedTuple):
    """What a program merges.

    Attributes:
        heads: of a token.
        lanes: words of a head, and more.
    """

    heads: int
    lanes: int

    @classmethod
    def of(cls, heads: int, size: int) -> MergeTile:
        lanes = _power_of_2(size)
        return cls(max(1, min(_power_of_2(heads), MERGED_HEADS, MERGED_WORDS // lanes)), lanes)


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
