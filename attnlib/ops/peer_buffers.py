"""The buffers by which the GPUs of one host exchange the states of a divided layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlib.errors import AttnlibError, ContractError, RankLostError

__all__ = ["MERGED_WORDS", "PeerBuffers", "ShareTile"]

_SLOTS = 8192
"""Programs times ranks of the largest exchange of queries, and of results."""
_SHARED_WORDS, MERGED_WORDS = 128, 256
"""Words that a program shares with a rank, and of the largest head that a program merges."""
_RANKS = 1024
"""More than a host has GPUs."""
_WAITS = 3
_LIMIT = timedelta(minutes=10)


class PeerBuffers(NamedTuple):
    """Views of this rank's buffer, which the other ranks write at the same offsets.

    Attributes:
        rank: of this process.
        distances: `[world_size]` int64, bytes from this rank's buffer to that of each rank.
        shared, merged, merged_lses: int64, words that this rank receives, of queries, of results
            and of LSEs; fixed ones for each program and rank, and for odd and even exchanges.
        share_counts, merge_counts: `[programs, 2]` int32, how many exchanges of a program ended and
            began on this rank.
        waits: `[3]` int64, the nanoseconds that a kernel waits for another rank (polls where there
            is no clock), whether a kernel has waited longer, and the address of `record`.
        limit: of a wait, the first of these.
        record: in memory of the host, 0 until a kernel ends with an error.
        owners: what keeps the memory of all ranks.
    """

    rank: int
    distances: Tensor
    shared: Tensor
    merged: Tensor
    merged_lses: Tensor
    share_counts: Tensor
    merge_counts: Tensor
    waits: Tensor
    limit: timedelta
    record: ctypes.c_int64
    owners: tuple[Any, ...]

    @staticmethod
    def num_bytes() -> int:
        """Of the buffer of a rank."""
        return sum(_sizes())

    @classmethod
    def of(
        cls, buffers: Sequence[Tensor], rank: int, *owners: Any, limit: timedelta = _LIMIT
    ) -> PeerBuffers:
        """Views of buffers of zeros.

        Args:
            buffers: `[num_bytes]` uint8 of each rank, as this process addresses them.
            rank: of this process.
            owners: further objects that keep the memory.
            limit: of the time that a kernel waits for another rank.
        """
        own = buffers[rank]
        distances = [each.data_ptr() - own.data_ptr() for each in buffers]
        # All in this memory: an engine may take that of torch's allocator away while it sleeps.
        parts = [part.view(torch.int64) for part in torch.split(own, _sizes())]
        shared, merged, lses, runs, to_each, waits = parts
        to_each = to_each[: len(buffers)]
        to_each.copy_(torch.tensor(distances, dtype=torch.int64, device="cpu"))
        counts = runs.view(torch.int32).view(2, _SLOTS, 2)
        memory = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=own.is_cuda)
        given = [limit // timedelta(microseconds=1) * 1000, 0, memory.data_ptr()]
        waits.copy_(torch.tensor(given, dtype=torch.int64, device="cpu"))
        record = ctypes.c_int64.from_address(memory.data_ptr())
        keep = (*buffers, memory, *owners)
        words = to_each, shared, merged, lses, counts[0], counts[1], waits
        return cls(rank, *words, limit, record, keep)

    def check(self) -> None:
        """Refuse further exchanges after one that did not end.

        Raises:
            RankLostError: a kernel has waited for another rank longer than the limit.
            ContractError: kernels of exchanges ran on two streams at once.
        """
        if self.record.value:
            raise self.error()

    def error(self) -> AttnlibError:
        """What the record says."""
        found, end = self.record.value, "end this process: its CUDA context is lost"
        what = "queries" if found >> 48 & 1 else "results"
        exchange = f"exchange {found & 0xFFFFFFFF} of {what} by memory"
        own = f"rank {self.rank} of {len(self.distances)}"
        if found >> 48 > 2:
            return ContractError(
                f"{own}: {exchange} ran at the same time as another one, on a second stream: "
                "let one stream wait for the other, or give the layers exchange='all_to_all', "
                f"and {end}",
                rule="X6",
            )
        return RankLostError(
            f"{own} waited {self.limit.total_seconds():g} s for rank {found >> 32 & 0xFFFF} in "
            f"{exchange}: find the error of that rank, or give the process group a longer "
            f"timeout, and {end}"
        )

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
    return [8 * each for each in (*words, 2 * _SLOTS, _RANKS, _WAITS)]
