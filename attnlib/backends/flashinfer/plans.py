"""Plans of FlashInfer wrappers: the page lists they take, and wrappers that are never planned again while somebody still needs the last plan.

`plan` writes a schedule into a pinned buffer of its wrapper and copies it to the device without waiting. A second plan on the same wrapper would
overwrite what the copy still reads, and would change a batch that has not run yet. So each plan leases a wrapper of its own; the lease ends with
the last batch that holds it, and the wrapper is planned again only after the copy has passed (an event says so).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["Lease", "PageList", "PlanKey", "WrapperPool", "list_pages"]


@dataclass(frozen=True)
class PlanKey:
    """What FlashInfer must know of a layer when it plans; layers with the same key share a plan.

    Attributes:
        window_left: keys visible before the query's own, -1 for all.
        window_right: 0 when no later key is visible, -1 otherwise.
        logits_soft_cap: None for none.
    """

    window_left: int
    window_right: int
    logits_soft_cap: float | None


@dataclass(frozen=True)
class PageList:
    """The pages of each request, as FlashInfer takes them.

    Attributes:
        indptr: [R+1] int32 CPU; where each request's pages start.
        indices: [>= 1] int32 device; page ids.
        last_page_len: [R] int32 CPU; tokens in the last page, 1 to block_size (1 for a request without pages, which has none to read).
        seq_lens: [R] int32 CPU; true lengths, 0 included.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    seq_lens: torch.Tensor


def list_pages(seq_lens: np.ndarray, block_table: torch.Tensor, block_size: int) -> PageList:
    """Cut the pages out of a dense block table: sizes come from the host's lengths, ids are gathered on the device. No host sync.

    Args:
        seq_lens: [R] int32, on the host.
        block_table: [R, max_blocks] int32 device; entries past a request's pages are not read (P3).
        block_size: tokens in one page.
    """
    counts = -(-seq_lens // block_size)
    indptr = np.zeros(len(seq_lens) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    last = np.where(counts > 0, seq_lens - (counts - 1) * block_size, 1).astype(np.int32)
    starts, total = torch.from_numpy(indptr), int(indptr[-1])
    return PageList(
        starts,
        _gather(block_table, starts, total),
        torch.from_numpy(last),
        torch.from_numpy(seq_lens.astype(np.int32)),
    )


def _gather(block_table: torch.Tensor, starts: torch.Tensor, total: int) -> torch.Tensor:
    device = block_table.device
    if total == 0:
        return torch.zeros(1, dtype=torch.int32, device=device)
    on_device = starts.to(device, non_blocking=True)
    rows = torch.repeat_interleave(on_device[1:] - on_device[:-1], output_size=total)
    columns = torch.arange(total, device=device, dtype=torch.int32) - on_device[rows]
    return block_table[rows, columns]


class Lease:
    """One wrapper for the lifetime of one plan."""

    def __init__(self, pool: WrapperPool, wrapper: Any, copied: torch.cuda.Event | None) -> None:
        self.wrapper = wrapper
        self._pool = pool
        self._copied = copied

    def planned(self) -> None:
        """Remember when the plan's copy to the device was enqueued."""
        if self._copied is not None:
            self._copied.record()

    def await_copy(self) -> None:
        """Wait until the last plan has left the pinned buffer: for a wrapper that must be planned again, because a graph holds its addresses."""
        if self._copied is not None:
            self._copied.synchronize()

    def __del__(self) -> None:
        self._pool.give_back(self.wrapper, self._copied)


class WrapperPool:
    """Wrappers of one kind on one device.

    Args:
        make: makes a new wrapper.
        device: where it plans; only a GPU copies behind the host's back.
        most: how many wrappers to make before waiting for one that is free but whose copy has not passed. Each holds 8 MiB on either side.
    """

    def __init__(self, make: Callable[[], Any], device: torch.device, most: int = 4) -> None:
        self._make = make
        self._device = device
        self._most = most
        self._made = 0
        self._free: list[tuple[Any, torch.cuda.Event | None]] = []

    def take(self) -> Lease:
        """A wrapper that may be planned now."""
        for place, (_, copied) in enumerate(self._free):
            if copied is None or copied.query():  # type: ignore[no-untyped-call]  # torch leaves it untyped
                return Lease(self, *self._free.pop(place))
        if self._free and self._made >= self._most:
            wrapper, copied = self._free.pop(0)
            if copied is not None:
                copied.synchronize()
            return Lease(self, wrapper, copied)
        self._made += 1
        event = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return Lease(self, self._make(), event)

    def give_back(self, wrapper: Any, copied: torch.cuda.Event | None) -> None:
        """The plan is not needed any more."""
        self._free.append((wrapper, copied))
