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
