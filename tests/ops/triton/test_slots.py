"""KV slots of query tokens."""

from __future__ import annotations

import pytest
import torch

from attnlib.ops.triton.slots import compute_slot_mapping


def _expected(
    starts: list[int], lengths: list[int], table: torch.Tensor, block_size: int, tokens: int
) -> list[int]:
    slots = [-1] * tokens
    for request, length in enumerate(lengths):
        query_len = starts[request + 1] - starts[request]
        for i in range(query_len):
            position = length - query_len + i
            if position >= 0:
                slots[starts[request] + i] = int(
                    table[request, position // block_size]
                ) * block_size + (position % block_size)
    return slots


@pytest.mark.parametrize("block_size", [8, 16, 544])
@pytest.mark.parametrize("requests", [1, 5, 70])
def test_slots_of_ragged_batches(device: torch.device, block_size: int, requests: int) -> None:
    """P4, M1: including requests without tokens and rows past the last request."""
    generator = torch.Generator().manual_seed(requests)
    query_lens = torch.randint(0, 5, (requests,), generator=generator)
    lengths = query_lens + torch.randint(0, 60, (requests,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)])
    table = torch.randint(0, 1 << 29, (requests, 9), generator=generator, dtype=torch.int32)
    tokens = int(starts[-1]) + 3
    got = compute_slot_mapping(
        starts.int().to(device), lengths.int().to(device), table.to(device), block_size, tokens
    )
    assert got.dtype == torch.int64
    assert got.tolist() == _expected(starts.tolist(), lengths.tolist(), table, block_size, tokens)


def test_writes_to_the_given_buffer(device: torch.device) -> None:
    """G3: in place, with strided table rows and slots beyond 2^31."""
    out = torch.full((4,), 77, dtype=torch.int64, device=device)
    table = torch.tensor([[1, 9, 7], [(1 << 30) + 1, 9, 7]], dtype=torch.int32, device=device)[
        :, :1
    ]
    starts, lengths = (
        torch.tensor([0, 1, 3], dtype=torch.int32),
        torch.tensor([4, 16], dtype=torch.int32),
    )
    got = compute_slot_mapping(starts.to(device), lengths.to(device), table, 16, 4, out=out)
    assert got is out
    assert out.tolist() == [19, ((1 << 30) + 1) * 16 + 14, ((1 << 30) + 1) * 16 + 15, -1]


def test_positions_beyond_the_table_have_no_slot(device: torch.device) -> None:
    """O2: they get -1, not a block of the next row."""
    table = torch.tensor([[3], [5]], dtype=torch.int32, device=device)
    starts, lengths = (
        torch.tensor([0, 2, 3], dtype=torch.int32),
        torch.tensor([17, 2], dtype=torch.int32),
    )
    got = compute_slot_mapping(starts.to(device), lengths.to(device), table, 16, 3)
    assert got.tolist() == [63, -1, 81]


def test_empty_batch(device: torch.device) -> None:
    """M7: no requests and no tokens are valid."""
    empty, table = (
        torch.empty(0, dtype=torch.int32, device=device),
        torch.empty(0, 1, dtype=torch.int32, device=device),
    )
    start = torch.zeros(1, dtype=torch.int32, device=device)
    assert compute_slot_mapping(start, empty, table, 16, 0).shape == (0,)
    assert compute_slot_mapping(start, empty, table, 16, 3).tolist() == [-1, -1, -1]
