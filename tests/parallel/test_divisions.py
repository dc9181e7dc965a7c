"""X1, X2: positions, and addresses on a rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnlib import AttentionSpec
from attnlib.errors import ContractError
from attnlib.parallel import (
    Contiguous,
    Division,
    Interleaved,
    ZigZag,
    exchange_bytes,
    explain_parallel,
    local_block_table,
    local_slots,
    token_positions,
)

DIVISIONS = [
    make
    for world in (1, 2, 3, 4)
    for make in (
        Interleaved(world), Interleaved(world, 3), Contiguous(world, 5), ZigZag(world, 4),
        ZigZag(world, 1), Contiguous.of_length(world, 41), ZigZag.of_length(world, 41),
    )
]  # fmt: skip
LENGTH = 60
SPEC = AttentionSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype=torch.float32)


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_a_division_enumerates_the_positions_of_each_rank(division: Division) -> None:
    """X1, with integers and with tensors."""
    held: list[list[int]] = [[] for _ in range(division.world_size)]
    for position in range(LENGTH):
        rank = division.owner(position)
        assert division.local(position) == len(held[rank])
        held[rank].append(position)
        counts = [division.count(position + 1, each) for each in range(division.world_size)]
        assert counts == [len(each) for each in held]
        assert division.bound(position + 1) == max(counts)
    positions = torch.arange(LENGTH)
    for rank, expected in enumerate(held):
        own = positions[division.owner(positions) == rank]
        assert own.tolist() == expected
        assert torch.equal(division.position(division.local(own), rank), own)
        assert division.count(positions, rank).tolist() == [
            sum(each < length for each in expected) for length in range(LENGTH)
        ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_segments_of_a_zigzag_are_its_positions(world_size: int) -> None:
    for length in range(40):
        division = ZigZag.of_length(world_size, length)
        for rank in range(world_size):
            held = [p for a, b in division.segments(rank, length) for p in range(a, b)]
            assert held == [p for p in range(length) if division.owner(p) == rank]


def test_numbers_that_divide_nothing_are_refused() -> None:
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    refused: dict[str, Callable[[], object]] = {
        "run=0": lambda: Interleaved(2, 0),
        "length=-5": lambda: ZigZag.of_length(2, -5),
        "world_size=0": lambda: Contiguous.of_length(0, 5),
        "rank=2 must be from 0 to 1": lambda: local_block_table(Interleaved(2, 4), 2, table, 4),
        "division is a int": lambda: explain_parallel(SPEC, 2),  # type: ignore[arg-type]
        "num_tokens=-1": lambda: exchange_bytes(SPEC, 2, -1),
    }
    for text, call in refused.items():
        with pytest.raises(ContractError, match=text):
            call()


def test_tables_and_slots_of_a_rank() -> None:
    """X2, X3: runs of one block of 4 tokens; two requests of 3 and 2 new tokens, and padding."""
    division, table = Interleaved(2, 4), torch.arange(12, dtype=torch.int32).view(2, 6)
    assert local_block_table(division, 1, table, 4).tolist() == [[1, 3, 5], [7, 9, 11]]
    starts, lengths = torch.tensor([0, 3, 5]).int(), torch.tensor([10, 14]).int()
    tokens = token_positions(starts, lengths, 6)
    assert tokens.request[:5].tolist() == [0, 0, 0, 1, 1]
    assert tokens.position.tolist() == [7, 8, 9, 12, 13, -1]
    own = [local_slots(division, r, tokens, local_block_table(division, r, table, 4), 4)
           for r in (0, 1)]  # fmt: skip
    assert own[0].tolist() == [-1, 2 * 4, 2 * 4 + 1, -1, -1, -1]
    assert own[1].tolist() == [1 * 4 + 3, -1, -1, 9 * 4, 9 * 4 + 1, -1]
    with pytest.raises(ContractError, match="multiple of 4"):
        local_block_table(Interleaved(2, 3), 0, table, 4)
