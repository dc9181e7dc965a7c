"""Block placements: each request has its own blocks; other table entries are invalid (P3)."""

from __future__ import annotations

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.testing.batch_spec import parse_batch
from attnlib.testing.block_placement import PLACEMENTS, PlacementKind, place_blocks

BATCH = parse_batch("q1s40_q20_q0s0_q3s33")


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_every_request_gets_the_blocks_it_needs(kind: PlacementKind) -> None:
    """P3: entry j of a row is the block of positions [j*N, (j+1)*N)."""
    placed = place_blocks(BATCH, 16, kind)
    assert [len(row) for row in placed.blocks] == [3, 2, 0, 3]
    owned = [block for row in placed.blocks for block in row]
    assert len(set(owned)) == len(owned)
    assert all(0 <= block < placed.num_blocks for block in owned)
    for request, row in enumerate(placed.blocks):
        assert placed.block_table[request, : len(row)].tolist() == list(row)
    assert placed.block_table.shape == (4, 3)
    assert placed.block_table.dtype == torch.int32


def test_kinds_give_different_orders() -> None:
    flat = {
        kind: [b for row in place_blocks(BATCH, 16, kind).blocks for b in row]
        for kind in PLACEMENTS
    }  # type: ignore[arg-type]
    assert flat["contiguous"] == list(range(8))
    assert flat["reversed"] == list(range(7, -1, -1))
    assert flat["shuffled"] != flat["contiguous"]
    assert place_blocks(BATCH, 16, "interleaved").blocks[0] == (0, 3, 6)
    top = place_blocks(BATCH, 16, "top")
    assert top.num_blocks >= 4 * 8
    assert max(b for row in top.blocks for b in row) == top.num_blocks - 1


def test_a_shared_prefix_is_context_in_every_request() -> None:
    """Requests share exactly the blocks that no request writes in this step."""
    batch = parse_batch("q1s40_q3s37_q5s60")
    placed = place_blocks(batch, 16, "shared_prefix")
    assert len({row[:2] for row in placed.blocks}) == 1
    rest = [block for row in placed.blocks for block in row[2:]]
    assert len(set(rest)) == len(rest)
    assert not set(rest) & set(placed.blocks[0][:2])


@pytest.mark.parametrize(("garbage", "expected"), [("minus_one", {-1}), ("huge", {2**30})])
def test_garbage_fills_the_entries_past_a_request(garbage: str, expected: set[int]) -> None:
    placed = place_blocks(BATCH, 16, garbage=garbage, extra_columns=2)  # type: ignore[arg-type]
    assert placed.block_table.shape == (4, 5)
    assert set(placed.block_table[1, 2:].tolist()) == expected
    assert set(placed.block_table[2].tolist()) == expected


def test_plausible_garbage_consists_of_other_blocks_in_the_pool() -> None:
    placed = place_blocks(BATCH, 16, garbage="plausible", extra_columns=2)
    tail = set(placed.block_table[1, 2:].tolist())
    assert tail.isdisjoint(placed.blocks[1])
    assert all(0 <= block < placed.num_blocks for block in tail)


def test_a_guarded_table_has_invalid_ids_before_and_after_it() -> None:
    """O2: one entry before the first and one past the last are block 2^30."""
    table = place_blocks(BATCH, 16, guarded=True).block_table
    storage = torch.empty(0, dtype=torch.int32).set_(table.untyped_storage())
    first, last = table.storage_offset(), table.storage_offset() + table.numel()
    assert storage[first - 1] == storage[last] == 2**30


def test_slots_follow_the_blocks() -> None:
    """P4: slot = block * N + offset."""
    placed = place_blocks(BATCH, 16, "reversed")
    assert placed.slots(0, 15, 18, 16) == [7 * 16 + 15, 6 * 16, 6 * 16 + 1]


def test_an_unknown_kind_lists_the_valid_names() -> None:
    with pytest.raises(
        ContractError, match="no placement is named 'random'; the kinds are contiguous, "
    ):
        place_blocks(BATCH, 16, "random")  # type: ignore[arg-type]


def test_a_table_can_be_a_view_of_a_wider_one() -> None:
    batch = parse_batch("q1s40_q1s7")
    plain, wide = (place_blocks(batch, 16, hidden_columns=columns) for columns in (0, 5))
    assert torch.equal(plain.block_table, wide.block_table)
    assert wide.block_table.stride() == (wide.block_table.shape[1] + 5, 1)
    whole = wide.block_table.as_strided((2, wide.block_table.stride(0)), wide.block_table.stride())
    assert (whole[:, wide.block_table.shape[1] :] == 2**30).all()
