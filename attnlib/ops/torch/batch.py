"""A packed batch as a list of requests.

The torch operations process one request or group at a time and need the lengths on the host. A
caller that has them there passes them, and nothing synchronizes; otherwise they are copied from the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Request", "clear_tail", "list_requests", "on_host"]


@dataclass(frozen=True)
class Request:
    """One request of a packed batch.

    Attributes:
        index: its row in the block table.
        start: its first query token.
        query_len: number of query tokens.
        seq_len: number of keys.
        causal: its flag; a 0-d bool tensor if its value is only known on the device.
    """

    index: int
    start: int
    query_len: int
    seq_len: int
    causal: bool | Tensor

    @property
    def first_position(self) -> int:
        """Position of the first query token; may be negative."""
        return self.seq_len - self.query_len

    @property
    def rows(self) -> slice:
        """The request's rows of the query, the output and the LSE."""
        return slice(self.start, self.start + self.query_len)


def list_requests(starts: Tensor, lengths: Tensor, causal: bool | Tensor) -> list[Request]:
    """The requests with at least one query token.

    Args:
        starts: `[R + 1]`, the first query token of each request; on the CPU to avoid a sync.
        lengths: `[R]`, sequence lengths, likewise.
        causal: for all requests, or a bool tensor `[R]`. A tensor on the CPU is read; of one on a
            device, each request holds its element, without a sync.
    """
    begins: Sequence[int] = starts.tolist()
    seq_lens: Sequence[int] = lengths.tolist()
    flags: Sequence[bool | Tensor]
    if not isinstance(causal, Tensor):
        flags = [causal] * len(seq_lens)
    elif causal.device.type == "cpu":
        flags = [bool(flag) for flag in causal.tolist()]
    else:
        flags = list(causal.bool().unbind())
    return [
        Request(index, begins[index], begins[index + 1] - begins[index], seq_len, flags[index])
        for index, seq_len in enumerate(seq_lens)
        if begins[index + 1] > begins[index]
    ]


def clear_tail(out: Tensor, lse: Tensor | None, starts: Tensor) -> None:
    """Set the rows at or past `starts[-1]` to output 0 and LSE -inf (M6)."""
    end = int(starts[-1]) if starts.numel() else 0
    out[end:].zero_()
    if lse is not None:
        lse[end:].fill_(-torch.inf)


def on_host(lengths: Tensor, host_copy: Tensor | None) -> Tensor:
    """`host_copy` if given, otherwise `lengths` copied to the CPU."""
    return lengths.cpu() if host_copy is None else host_copy
