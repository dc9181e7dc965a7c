"""A packed batch as a list of requests.

Plain torch walks over requests on the host, so it needs their lengths there. Given the copies that an engine has anyway
it asks no device for them; otherwise it waits for the transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Request", "clear_tail", "list_requests", "on_host"]


@dataclass(frozen=True)
class Request:
    """One request of a packed batch; `first_position` is that of its first query token and may be negative."""

    index: int
    start: int
    query_len: int
    seq_len: int
    causal: bool | Tensor

    @property
    def first_position(self) -> int:
        return self.seq_len - self.query_len

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.query_len)


def list_requests(starts: Tensor, lengths: Tensor, causal: bool | Tensor) -> list[Request]:
    """The requests with at least one query token. `starts [R + 1]` and `lengths [R]` are best on the CPU.

    A `causal [R]` tensor on a CPU is read; elsewhere each request keeps its element as a tensor, and no sync happens.
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
    """Rows at or past `starts[-1]`: output exactly 0, LSE -inf (M6)."""
    end = int(starts[-1]) if starts.numel() else 0
    out[end:].zero_()
    if lse is not None:
        lse[end:].fill_(-torch.inf)


def on_host(lengths: Tensor, host_copy: Tensor | None) -> Tensor:
    """The copy that the caller has on the host, or one that is fetched now."""
    return lengths.cpu() if host_copy is None else host_copy
