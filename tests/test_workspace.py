"""Workspace: growing and fixed buffers."""

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits, Workspace

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4)


def test_a_fixed_workspace_names_the_bytes() -> None:
    grown = Workspace(torch.device("cpu"))
    assert grown.reserve(100).numel() >= 100 and grown.num_bytes == 100
    with pytest.raises(ContractError, match="needs 101 bytes of workspace, 100 were declared"):
        Workspace(torch.device("cpu"), 100, fixed=True).reserve(101)
    with pytest.raises(ContractError, match="max_num_tokens=0 must be at least 1"):
        BatchLimits(max_num_reqs=1, max_num_tokens=0, max_seq_len=1)
    with pytest.raises(ContractError, match="max_seq_len=2147483648 does not fit int32"):
        BatchLimits(max_num_reqs=1, max_num_tokens=1, max_seq_len=1 << 31)
    with pytest.raises(ContractError, match="max_seq_len nan is a float; it must be an integer"):
        BatchLimits(max_num_reqs=1, max_num_tokens=1, max_seq_len=float("nan"))
