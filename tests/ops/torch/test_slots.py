"""Slot mapping: the address of every new token (P3, P4)."""

from __future__ import annotations

import torch

from attnlib.ops.torch.slots import compute_slot_mapping


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE = torch.tensor([[5, 2, -1], [7, 2**31 - 1, -1], [1, 3, 4]], dtype=torch.int32)


def test_positions_become_slots() -> None:
    """P4: slot = block * N + offset of position seq_len - query_len + i; -1 past the batch."""
    slots = compute_slot_mapping(lengths(0, 3, 3, 5), lengths(6, 4, 9), TABLE, 4, 7)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [5 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1, 3 * 4 + 3, 4 * 4 + 0, -1, -1]


def test_large_pools() -> None:
    """P6: block ids near 2^31 give slots past 2^31."""
    table = torch.tensor([[2**31 - 2]], dtype=torch.int32)
    assert compute_slot_mapping(lengths(0, 1), lengths(3), table, 16, 1).tolist() == [
        (2**31 - 2) * 16 + 2
    ]


def test_positions_without_a_page() -> None:
    """A narrow table, a negative id or a negative position gives -1, not another slot."""
    assert compute_slot_mapping(lengths(0, 3), lengths(13), TABLE[:1], 4, 3).tolist() == [
        -1,
        -1,
        -1,
    ]
    assert compute_slot_mapping(lengths(0, 3), lengths(1), TABLE[2:], 4, 3).tolist() == [-1, -1, 4]


def test_empties_and_out() -> None:
    """M7: no requests, no tokens, no columns; `out` is filled and returned."""
    out = torch.full((3,), 99)
    assert compute_slot_mapping(lengths(0), lengths(), TABLE[:0], 4, 3, out=out) is out
    assert out.tolist() == [-1, -1, -1]
    assert compute_slot_mapping(lengths(0, 0), lengths(0), TABLE[:1], 4, 0).shape == (0,)
    assert compute_slot_mapping(lengths(0, 1), lengths(1), TABLE[:1, :0], 4, 1).tolist() == [-1]
    assert compute_slot_mapping(lengths(0, 1), lengths(2), TABLE[:1], 4, 3, out=out).tolist() == [
        21,
        -1,
        -1,
    ]


def test_no_host_sync() -> None:
    """Nothing synchronizes: meta tensors would raise."""
    with torch.device("meta"):
        starts, table = torch.empty(4, dtype=torch.int32), torch.empty(3, 5, dtype=torch.int32)
        assert compute_slot_mapping(
            starts, torch.empty(3, dtype=torch.int32), table, 16, 9
        ).shape == (9,)
