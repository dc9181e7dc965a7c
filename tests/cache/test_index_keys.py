"""What a cache of index keys refuses, before anything is written."""

from __future__ import annotations

import pytest
import torch

from attnlib.cache.index_keys import IndexKeyCache
from attnlib.errors import ContractError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("keys", "slots", "message"),
    [
        (torch.randn(2, 8), torch.tensor([0, 12]), r"slot_mapping\[1\]=12 is outside the cache"),
        (torch.randn(1, 8), torch.tensor([0, 1]), "has 1 tokens, but slot_mapping has 2"),
        (torch.randn(2, 4), torch.tensor([0, 1]), "index keys are torch.float32"),
        (torch.ones(2, 8, dtype=torch.int64), torch.tensor([0, 1]), "index keys are torch.int64"),
        (torch.randn(2, 8), torch.tensor([0, 1]).int(), "slot_mapping has dtype torch.int32"),
    ],
)
def test_a_write_that_does_not_fit_is_refused(
    dtype: torch.dtype, keys: torch.Tensor, slots: torch.Tensor, message: str
) -> None:
    cache = IndexKeyCache.allocate(3, 4, 8, dtype, "cpu")
    with pytest.raises(ContractError, match=message):
        cache.write(keys, slots)
    assert not cache.keys.float().any() and (cache.scales is None or not cache.scales.any())
