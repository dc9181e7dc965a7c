"""Arguments of functions that need no group (X1, X2, X3): no raw errors of Python or torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnlib
from attnlib.errors import ContractError
from attnlib.parallel import (
    Interleaved,
    divided_batch,
    exchange_bytes,
    explain_parallel,
    local_block_table,
    local_slots,
    token_positions,
    warmup_parallel,
)

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=4
)
STARTS = torch.tensor([0, 1, 3], dtype=torch.int32)
LENGTHS = torch.tensor([5, 6], dtype=torch.int32)
TABLE = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
JUNK = (None, "x", 1.5, float("nan"), [1], {}, object(), torch.zeros(3), torch.tensor(1.0))

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "token_positions": (
        token_positions,
        {"query_start_loc": STARTS, "seq_lens": LENGTHS, "num_tokens": 3},
        ("query_start_loc", "seq_lens", "num_tokens"),
    ),
    "local_slots": (
        local_slots,
        {
            "division": Interleaved(2, 4),
            "rank": 0,
            "tokens": token_positions(STARTS, LENGTHS, 3),
            "block_table": TABLE,
            "block_size": 4,
        },
        ("division", "rank", "tokens", "block_table", "block_size"),
    ),
    "local_block_table": (
        local_block_table,
        {"division": Interleaved(2, 4), "rank": 0, "block_table": TABLE, "block_size": 4},
        ("division", "rank", "block_size"),
    ),
    "exchange_bytes": (
        exchange_bytes,
        {"spec": SPEC, "world_size": 2, "num_tokens": 1},
        ("spec", "world_size", "num_tokens"),
    ),
    "explain_parallel": (
        explain_parallel,
        {"spec": SPEC, "division": Interleaved(2, 4)},
        ("spec", "division"),
    ),
    "divided_batch": (
        divided_batch,
        {"query_lens": [1, 2], "seq_lens": [5, 6], "block_table": TABLE, "device": "cpu"},
        ("query_lens", "seq_lens", "block_table"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_named(name: str) -> None:
    function, given, arguments = CALLS[name]
    function(**given)
    for argument in arguments:
        for value in JUNK:
            with pytest.raises(ContractError):
                function(**given | {argument: value})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("token_positions", {"num_tokens": -1}, "num_tokens=-1 must not be negative"),
        ("token_positions", {"seq_lens": LENGTHS.long()}, "seq_lens is torch.int64 .2. on cpu; it"),
        ("token_positions", {"seq_lens": LENGTHS[:1]}, "pass .R . 1. and .R., on one device"),
        ("token_positions", {"seq_lens": LENGTHS.to("meta")}, "on one device"),
        ("local_slots", {"block_size": 0}, "block_size=0 must be at least 1"),
        ("local_slots", {"rank": 2}, "rank=2 must be from 0 to 1"),
        ("local_slots", {"block_table": TABLE.float()}, "block_table is torch.float32"),
        ("local_block_table", {"block_size": -4}, "block_size=-4 must be at least 1"),
        ("divided_batch", {"device": 1.5}, "device=1.5 is not known; use 'cpu'"),
        ("divided_batch", {"device": 10**30}, "device=10000.* is not known; use 'cpu'"),
        ("divided_batch", {"query_lens": [1, -2]}, "-2"),
        ("exchange_bytes", {"world_size": 0}, "world_size=0 must be at least 1"),
    ],
)
def test_messages_name_the_value_and_the_limit(
    name: str, change: dict[str, Any], message: str
) -> None:
    function, given, _ = CALLS[name]
    with pytest.raises(ContractError, match=message):
        function(**given | change)


def test_warm_ups_take_layers() -> None:
    cache = attnlib.PagedKVCache.allocate(SPEC, num_blocks=2, device="cpu")
    limits = attnlib.BatchLimits(max_num_reqs=1, max_num_tokens=1, max_seq_len=4)
    for layer in (None, "x", attnlib.Attention(SPEC, device="cpu")):
        with pytest.raises(ContractError, match="layer is a .*warmup_parallel takes a Parallel"):
            warmup_parallel(layer, cache, limits)
