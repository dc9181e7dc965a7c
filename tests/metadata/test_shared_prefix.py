"""Shared prefixes: found in a block table, checked, and sliced with their batch."""

from __future__ import annotations

import pytest
import torch

import attnlib
from attnlib.errors import ContractError
from attnlib.metadata.shared_prefix import (
    SharedPrefix,
    check_shared_prefixes,
    find_shared_prefixes,
    prefixes_of_requests,
)


def _table(*rows: list[int]) -> torch.Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [-7] * (width - len(row)) for row in rows], dtype=torch.int32)


def _lens(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


def test_a_tree_of_prefixes() -> None:
    """M13: each level starts where the one above it ends; requests of one block only do not
    share."""
    table = _table([1, 2, 3, 4], [9, 8], [1, 2, 3, 5], [1, 2, 6], [9, 7])
    found = find_shared_prefixes(table, _lens(16, 8, 16, 12, 8), 4)
    assert found == [
        SharedPrefix((0, 2, 3), 0, 8),
        SharedPrefix((1, 4), 0, 4),
        SharedPrefix((0, 2), 8, 12),
    ]
    assert check_shared_prefixes(found, [16, 8, 16, 12, 8], 4) == [12, 4, 12, 8, 4]


def test_only_full_blocks_of_the_context_count() -> None:
    """M13: the block that a step writes, and entries behind a request, are no shared prefix."""
    table = _table([1, 2, 3], [1, 2, 3])
    assert find_shared_prefixes(table, _lens(11, 12), 4) == [SharedPrefix((0, 1), 0, 8)]
    assert find_shared_prefixes(table, _lens(3, 12), 4) == []
    assert find_shared_prefixes(table, _lens(12, 12), 4, min_tokens=16) == []
    assert find_shared_prefixes(_table([]), _lens(0), 4) == []


def test_a_request_that_ends_within_the_prefix_of_others() -> None:
    """Two levels: all three share two blocks, two of them a third one."""
    table = _table([1, 2, 3], [1, 2, 3], [1, 2])
    assert find_shared_prefixes(table, _lens(12, 12, 8), 4) == [
        SharedPrefix((0, 1, 2), 0, 8),
        SharedPrefix((0, 1), 8, 12),
    ]


def test_tensors_on_the_host_only() -> None:
    """A device tensor would need a synchronization."""
    with pytest.raises(ContractError, match="pass host copies"):
        find_shared_prefixes(torch.empty(2, 2, device="meta"), _lens(1, 1), 4)
    with pytest.raises(ContractError, match=r"must be \[R, max_blocks\] and \[R\]"):
        find_shared_prefixes(_table([1], [1]), _lens(1), 4)


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ([SharedPrefix((0,), 0, 4)], "at least two different requests"),
        ([SharedPrefix((1, 1), 0, 4)], "at least two different requests"),
        ([SharedPrefix((0, 1), 0, 6)], "whole blocks of 4"),
        ([SharedPrefix((0, 1), 4, 4)], "whole blocks of 4"),
        ([SharedPrefix((0, 2), 0, 4)], "names request 2 of 2"),
        ([SharedPrefix((0, 1), 4, 8)], "prefixes of request 0 end at 0"),
        ([SharedPrefix((0, 1), 0, 12)], "ends past the 8 tokens that request 1"),
    ],
)
def test_wrong_prefixes_are_refused(prefixes: list[SharedPrefix], message: str) -> None:
    """M13: before any launch."""
    with pytest.raises(ContractError, match=message):
        check_shared_prefixes(prefixes, [16, 8], 4)


def test_slices_keep_the_prefixes_of_their_requests() -> None:
    """A prefix with a request outside of the slice is dropped, with those that continue it."""
    prefixes = [
        SharedPrefix((0, 1), 0, 8), SharedPrefix((2, 3), 0, 4), SharedPrefix((2, 3), 4, 8),
    ]  # fmt: skip
    assert prefixes_of_requests(prefixes, 1, 4) == (
        SharedPrefix((1, 2), 0, 4), SharedPrefix((1, 2), 4, 8),
    )  # fmt: skip
    assert prefixes_of_requests(prefixes, 0, 3) == (SharedPrefix((0, 1), 0, 8),)
    assert prefixes_of_requests(None, 0, 3) is None


def test_validation_compares_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """M13: with ATTNLIB_VALIDATE, a stated prefix in different blocks is refused."""
    spec = attnlib.AttentionSpec(num_heads=2, head_size=16, dtype=torch.float32, block_size=4)
    builder = attnlib.get_attn_backend(spec, "torch", "cpu").make_builder(spec, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 1], [9, 9], [[1, 2, 3], [1, 4, 5]], 4, "cpu"
    ).replace(shared_prefixes=[SharedPrefix((0, 1), 0, 8)])
    builder.build(0, common)
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    with pytest.raises(ContractError, match="not in the same blocks of the cache for request 1"):
        builder.build(0, common)


def test_sizes_that_are_no_integers_are_refused() -> None:
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([8, 8])
    for size, message in ((0, "must be at least 1"), (None, "is a NoneType"), (3.5, "is a float")):
        with pytest.raises(ContractError, match=f"block_size.*{message}"):
            find_shared_prefixes(table, lengths, size)
    with pytest.raises(ContractError, match="min_tokens .*is a str"):
        find_shared_prefixes(table, lengths, 4, min_tokens="x")
    for given in ((table.float(), lengths), (table, lengths.float())):
        with pytest.raises(ContractError, match="is torch.float32; it must hold integers"):
            find_shared_prefixes(*given, 4)
