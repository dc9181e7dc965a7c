"""P14: what a cache of packed latents refuses, before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.cache.packed_latents import PackedLatentCache
from attnlib.errors import ContractError
from attnlib.ops.params import AttentionParams
from attnlib.sparse.key_selection import KeySelection, SelectedKeys

PARAMS = AttentionParams(scale=0.1)


def _ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _attend(**changes: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "query": torch.randn(2, 3, 576),
        "block_table": _ints([1, 2], [0, 3]),
        "query_start_loc": _ints(0, 1, 2),
        "seq_lens": _ints(7, 4),
        "params": PARAMS,
        "max_query_len": 1,
        "max_seq_len": 8,
    }
    return PackedLatentCache.allocate(4, 4, "cpu").attend(**{**arguments, **changes})


def test_a_loose_bound_of_lengths_is_no_error() -> None:
    assert _attend(max_seq_len=1000).shape == (2, 3, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": _ints([1, 9], [0, 3])}, r"block_table\[0\]\[1\]=9 is outside the pool"),
        ({"block_table": _ints([1, -1], [0, 3])}, r"block_table\[0\]\[1\]=-1 is outside the pool"),
        ({"block_table": _ints([1], [0])}, "has 1 entries, but seq_lens.0.=7 needs 2 blocks"),
        ({"block_table": _ints([1, 2])}, "block_table is torch.int32"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "block_table is torch.int64"),
        ({"seq_lens": _ints(7, -4)}, r"seq_lens\[1\]=-4 must not be negative"),
        ({"seq_lens": torch.tensor([7, 4])}, "seq_lens is torch.int64"),
        ({"query_start_loc": _ints(0, 1, 3)}, "query_start_loc ends at 3, past the 2 rows"),
        ({"query_start_loc": _ints(0, 2, 1)}, "query_start_loc falls from 2 to 1"),
        ({"query_start_loc": _ints(0, 2)}, "query_start_loc is torch.int32"),
        ({"max_seq_len": 5}, "exceeds max_seq_len=5"),
        ({"query": torch.randn(2, 3, 512)}, r"query is \(2, 3, 512\)"),
        ({"query": torch.randn(2, 3, 576).double()}, "query is torch.float64"),
        ({"lse": torch.empty(3, 2)}, "lse is torch.float32"),
        ({"selection": KeySelection(max_blocks=2)}, "belong together"),
        (
            {
                "selection": KeySelection(max_blocks=2),
                "selected": SelectedKeys(torch.zeros(1, 1, 2, dtype=torch.int32)),
            },
            "have 1 lists, but the batch has 2 tokens",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        _attend(**changes)


@pytest.mark.parametrize(
    ("latents", "slots", "message"),
    [
        (torch.randn(2, 576), torch.tensor([0, 16]), r"slot_mapping\[1\]=16 is outside the cache"),
        (torch.randn(2, 576), _ints(0, 1), "slot_mapping has dtype torch.int32"),
        (torch.randn(1, 576), torch.tensor([0, 1]), "has 1 tokens, but slot_mapping has 2"),
        (torch.randn(2, 512), torch.tensor([0, 1]), "latents are torch.float32"),
        (torch.ones(2, 576, dtype=torch.int32), torch.tensor([0, 1]), "latents are torch.int32"),
        (torch.randn(2, 576).double(), torch.tensor([0, 1]), "latents are torch.float64"),
    ],
)
def test_a_write_that_does_not_fit_is_refused(
    latents: torch.Tensor, slots: torch.Tensor, message: str
) -> None:
    cache = PackedLatentCache.allocate(4, 4, "cpu")
    with pytest.raises(ContractError, match=message):
        cache.write(latents, slots)
    assert not cache.data.any()
