"""Page lists, and the pool of wrappers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnlib.backends.flashinfer.plans import WrapperPool, list_pages


def test_page_lists() -> None:
    """P3: only pages in use; last_page_len is in 1..page_size even for empty requests."""
    table = torch.tensor([[7, 8, -1], [-1, 2**30, -1], [3, 4, 5]], dtype=torch.int32)
    pages = list_pages(np.array([17, 0, 48], dtype=np.int32), table, 16)
    assert pages.indptr.tolist() == [0, 2, 2, 5] and pages.indices.tolist() == [7, 8, 3, 4, 5]
    assert pages.last_page_len.tolist() == [1, 1, 16] and pages.seq_lens.tolist() == [17, 0, 48]
    assert pages.indices.dtype == pages.indptr.dtype == torch.int32
    empty = list_pages(np.array([0, 0], dtype=np.int32), table[:2], 16)
    assert empty.indptr.tolist() == [0, 0, 0] and empty.indices.shape == (1,)


def test_page_lists_of_a_sliced_table() -> None:
    """P9: the table may be a view of a wider one."""
    wide = torch.arange(24, dtype=torch.int32).view(3, 8)
    assert list_pages(np.array([20, 5], dtype=np.int32), wide[1:, 2:5], 16).indices.tolist() == [
        10,
        11,
        18,
    ]


class _Event:
    """An event that has passed only after `synchronize`."""

    def __init__(self) -> None:
        self.passed = False
        self.waits = 0

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waits += 1
        self.passed = True

    def record(self) -> None:
        self.passed = False


def test_wrapper_is_not_replanned_during_its_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G4: a free wrapper is skipped during its copy; at the limit `take` waits for the copy."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    pool = WrapperPool(object, torch.device("cuda"), max_wrappers=2)
    first = pool.take()
    first.planned()
    wrapper, event = first.wrapper, first._copied
    assert isinstance(event, _Event)
    del first
    second = pool.take()
    assert second.wrapper is not wrapper and event.waits == 0
    second.planned()
    third = pool.take()
    assert third.wrapper is wrapper and event.waits == 1
    event.passed = True
