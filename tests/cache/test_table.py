"""P3: the block table, and P4: the slots it leads to."""

import pytest
import torch

from attnlib.cache.slots import compute_slot_mapping
from attnlib.cache.table import BlockTable
from attnlib.errors import ContractError


def test_rows_grow_move_and_swap() -> None:
    table = BlockTable(3, 4)
    table.add_row([5, 6], 0)
    table.append_row([7], 0)
    table.add_row([1], 1)
    assert table.row(0) == [5, 6, 7] and table.row(1) == [1] and table.row(2) == []
    table.swap_row(0, 1)
    assert table.row(0) == [1] and table.row(1) == [5, 6, 7]
    table.move_row(1, 2)
    assert table.row(2) == [5, 6, 7]
    table.clear_row(1)
    assert table.row(1) == []
    assert table.commit(3).tolist() == [[1, -1, -1, -1], [-1, -1, -1, -1], [5, 6, 7, -1]]
    assert table.get_device_tensor().data_ptr() == table.commit(2).data_ptr(), (
        "G3: one address for its lifetime"
    )


def test_a_row_that_is_too_wide_is_left_as_it_was() -> None:
    table = BlockTable(2, 2)
    table.add_row([1], 0)
    with pytest.raises(
        ContractError, match=r"row 0 would hold 3 blocks, but the table has 2 columns.*\[P3\]"
    ):
        table.append_row([2, 3], 0)
    assert table.row(0) == [1]
    with pytest.raises(ContractError, match="row 2 is outside"):
        table.add_row([1], 2)
    with pytest.raises(ContractError, match="cannot hold a request"):
        BlockTable(0, 4)


def test_slots_of_context_and_new_tokens() -> None:
    """P4: slot = block * N + offset, for positions seq_len - query_len on; the tail is -1."""
    starts, lens = (
        torch.tensor([0, 1, 4], dtype=torch.int32),
        torch.tensor([5, 3], dtype=torch.int32),
    )
    table = torch.tensor([[9, 2], [4, 2**30]], dtype=torch.int32)
    assert compute_slot_mapping(starts, lens, table, 4, 6).tolist() == [8, 16, 17, 18, -1, -1]
    assert compute_slot_mapping(starts, lens, table, 4).shape == (4,)
    with pytest.raises(ContractError, match=r"must be \[R, max_blocks\], \[R\] and \[R\+1\]"):
        compute_slot_mapping(starts, lens, table[:1], 4)
