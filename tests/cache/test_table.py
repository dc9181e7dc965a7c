"""P3: the block table."""

from typing import Any

import numpy as np
import pytest
import torch

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


def test_a_refused_row_is_left_unchanged() -> None:
    table = BlockTable(2, 2)
    table.add_row([1], 0)
    with pytest.raises(
        ContractError, match=r"row 0 would hold 3 blocks, but the table has 2 columns.*\[P3\]"
    ):
        table.append_row([2, 3], 0)
    assert table.row(0) == [1]
    with pytest.raises(ContractError, match="row 0 would hold 3 blocks"):
        table.add_row([2, 3, 4], 0)
    assert table.row(0) == [1]
    with pytest.raises(ContractError, match="row 2 is outside"):
        table.add_row([1], 2)
    with pytest.raises(ContractError, match="cannot hold a request"):
        BlockTable(0, 4)


@pytest.mark.parametrize("block", [-1, 2**31, 2**32])
@pytest.mark.parametrize("method", ["add_row", "append_row"])
def test_invalid_block_ids_are_refused(method: str, block: int) -> None:
    table = BlockTable(2, 4)
    table.add_row([1], 0)
    with pytest.raises(ContractError, match=rf"row 0: block id {block} .*\[P3\]"):
        getattr(table, method)([2, block], 0)
    assert table.row(0) == [1]


@pytest.mark.parametrize(
    "blocks", [[1.7], [1, 2.0], [True], ["1"], [[1], [2]], torch.tensor([1.7]), [None]]
)
@pytest.mark.parametrize("method", ["add_row", "append_row"])
def test_ids_that_are_not_integers_are_refused(method: str, blocks: Any) -> None:
    """P3: torch would truncate 1.7 to block 1."""
    table = BlockTable(2, 4)
    table.add_row([1], 0)
    with pytest.raises(ContractError, match="row 0: block id.*integer"):
        getattr(table, method)(blocks, 0)
    assert table.row(0) == [1]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (None, "block ids=None is a NoneType; it must be a list of ids"),
        (5, r"block ids are torch.int64 \(\), for example 5"),
        ({1, 2}, "block ids are a set, which has no order"),
        (np.array([1], dtype=np.uint64), "block ids are torch.uint64"),
    ],
)
def test_block_ids_that_are_no_list(blocks: Any, message: str) -> None:
    table = BlockTable(2, 4)
    table.add_row([1], 0)
    with pytest.raises(ContractError, match=message):
        table.add_row(blocks, 0)
    assert table.row(0) == [1]
    table.add_row(iter([3, 2]), 0)
    assert table.row(0) == [3, 2]


def test_integers_of_other_types() -> None:
    table = BlockTable(2, 4)
    table.add_row(np.array([3, 1], dtype=np.int64), np.int64(1))
    table.append_row(torch.tensor([2], dtype=torch.int16), 1)
    assert table.row(1) == [3, 1, 2]
    first, second = torch.tensor(0), torch.tensor(1)
    table.swap_row(first, second)
    assert (table.row(first), table.row(second)) == ([3, 1, 2], [])
    table.move_row(first, second)
    table.clear_row(first)
    table.append_row([3], second)
    assert (table.row(0), table.row(1)) == ([], [3, 1, 2, 3])


def test_rows_and_sizes_that_are_not_integers_or_outside() -> None:
    table = BlockTable(2, 4)
    for call in (
        lambda: table.add_row([1], 0.5),
        lambda: table.row(1.0),
        lambda: table.move_row(0, 1.5),
        lambda: table.commit(1.5),
        lambda: table.commit(3),
        lambda: table.commit(-1),
        lambda: BlockTable(2.5, 4),
    ):
        with pytest.raises(ContractError):
            call()
