"""P4: the slot mapping."""

import pytest
import torch

from attnlib.cache.slots import compute_slot_mapping
from attnlib.errors import ContractError


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": [0, 2, 1]}, "query_start_loc falls from 2 to 1"),
        ({"query_start_loc": [1, 1, 4]}, r"query_start_loc\[0\]=1 must be 0"),
        ({"query_start_loc": [0, 1, 7]}, "query_start_loc ends at 7, past the 4 rows"),
        ({"seq_lens": [5, 2]}, r"seq_lens\[1\]=2 is below the 3 new tokens"),
        ({"seq_lens": [9, 3]}, r"seq_lens\[0\]=9 needs 3 blocks"),
        ({"block_table": [[9, -1], [4, 0]]}, r"block_table\[0\]\[1\]=-1 must not be negative"),
        ({"block_size": 2.5}, "block_size 2.5 is a float"),
        ({"num_tokens": -1}, "num_tokens=-1 must not be negative"),
        ({"out": torch.empty(3, dtype=torch.int64)}, "out is torch.int64"),
        ({"out": torch.empty(4, dtype=torch.int32)}, "out is torch.int32"),
        ({"seq_lens": [5.0, 3.0]}, "seq_lens is torch.float32"),
    ],
)
def test_a_batch_that_disagrees_is_refused(changes: dict, message: str) -> None:
    arguments = {
        "query_start_loc": [0, 1, 4],
        "seq_lens": [5, 3],
        "block_table": [[9, 2], [4, 0]],
        "block_size": 4,
        "num_tokens": 4,
        **changes,
    }
    for name in ("query_start_loc", "seq_lens", "block_table"):
        values = torch.tensor(arguments[name])
        arguments[name] = values if values.is_floating_point() else values.int()
    with pytest.raises(ContractError, match=message):
        compute_slot_mapping(**arguments)
