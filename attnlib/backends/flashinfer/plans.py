"""Page lists for FlashInfer's plans, and a pool of wrappers that are not replanned while in use.

`plan` writes a schedule to a pinned buffer of its wrapper and copies it to the device
asynchronously. A second plan on the same wrapper could overwrite the source of that copy, and would
change a batch that has not run yet. Each plan therefore leases a wrapper. The lease ends when the
last batch that holds it is released, and the wrapper is planned again only after an event shows
that the copy has finished.
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
    """The layer parameters that a plan depends on; layers with equal keys share a plan.

    Attributes:
        window_left: keys visible before the query's own; -1 is unbounded.
        window_right: 0 if no later key is visible, otherwise -1.
        logits_soft_cap: the soft cap, or None.
    """

    window_left: int
    window_right: int
    logits_soft_cap: float | None


@dataclass(frozen=True)
class PageList:
    """The pages of each request in FlashInfer's format.

    Attributes:
        indptr: `[R + 1]` int32 on the CPU, the first page of each request.
        indices: `[>= 1]` int32 on the device, page ids.
        last_page_len: `[R]` int32 on the CPU, tokens in the last page, 1 to block_size; 1 for a
            request without pages.
        seq_lens: `[R]` int32 on the CPU, sequence lengths, which may be 0.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    seq_lens: torch.Tensor


def list_pages(seq_lens: np.ndarray, block_table: torch.Tensor, block_size: int) -> PageList:
    """The page list of a dense block table. Ids are gathered on the device, without a sync.

    Args:
        seq_lens: `[R]` int32 on the host.
        block_table: `[R, max_blocks]` int32; entries past a request's pages are not read (P3).
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
    """A wrapper for the lifetime of one plan; returned to its pool when it is deleted."""

    def __init__(self, pool: WrapperPool, wrapper: Any, copied: torch.cuda.Event | None) -> None:
        self.wrapper = wrapper
        self._pool = pool
        self._copied = copied

    def planned(self) -> None:
        """Record an event after the plan's copy to the device."""
        if self._copied is not None:
            self._copied.record()

    def await_copy(self) -> None:
        """Wait for the copy of the last plan, so that the same wrapper can be planned again."""
        if self._copied is not None:
            self._copied.synchronize()

    def __del__(self) -> None:
        self._pool.release(self.wrapper, self._copied)


class WrapperPool:
    """Wrappers of one kind on one device.

    Args:
        make: creates a wrapper.
        device: the device of the plans; only copies to a GPU are asynchronous.
        max_wrappers: number of wrappers after which `take` waits for the copy of a free wrapper
            instead of creating another one. Each holds 8 MiB on the device and 8 MiB on the host.
    """

    def __init__(
        self, make: Callable[[], Any], device: torch.device, max_wrappers: int = 4
    ) -> None:
        self._make = make
        self._device = device
        self._max_wrappers = max_wrappers
        self._made = 0
        self._free: list[tuple[Any, torch.cuda.Event | None]] = []

    def take(self) -> Lease:
        """A wrapper that can be planned now."""
        for index, (_, copied) in enumerate(self._free):
            if copied is None or copied.query():  # type: ignore[no-untyped-call]  # untyped in torch
                return Lease(self, *self._free.pop(index))
        if self._free and self._made >= self._max_wrappers:
            wrapper, copied = self._free.pop(0)
            if copied is not None:
                copied.synchronize()
            return Lease(self, wrapper, copied)
        self._made += 1
        event = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]  # untyped in torch
        return Lease(self, self._make(), event)

    def release(self, wrapper: Any, copied: torch.cuda.Event | None) -> None:
        """Return a wrapper whose plan is no longer used."""
        self._free.append((wrapper, copied))
