"""Decodes and prefills of a batch, and reordering with the smallest number of swaps."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.split import (
    leading_decodes,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
)


def _batch(queries: list[int], sequences: list[int] | None = None) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(
        queries, sequences or [q + 10 for q in queries], device="cpu"
    )


@pytest.mark.parametrize(
    ("queries", "threshold", "expected"),
    [
        ([1, 1, 1], 1, (3, 0, 3, 0)),
        ([1, 1, 7], 1, (2, 1, 2, 7)),
        ([7, 9], 1, (0, 2, 0, 16)),
        ([4, 1, 7], 4, (2, 1, 5, 7)),
        ([1, 0, 7], 1, (2, 1, 1, 7)),
        ([], 1, (0, 0, 0, 0)),
    ],
)
def test_index_of_the_first_prefill(queries: list[int], threshold: int, expected: tuple) -> None:
    assert split_decodes_and_prefills(_batch(queries), threshold) == expected


def test_a_decode_after_a_prefill_is_refused() -> None:
    with pytest.raises(
        ContractError, match="request 2 has 1 new tokens .* follows request 1 with 7: reorder"
    ):
        split_decodes_and_prefills(_batch([1, 7, 1]))
    assert leading_decodes(_batch([1, 7, 1]), 1) == (1, 1), (
        "builders serve it all the same, by the prefill kernel"
    )


def test_uniform_decodes() -> None:
    assert split_decodes_and_prefills(_batch([2, 2, 1, 2]), 4, require_uniform=True) == (2, 2, 4, 3)
    assert split_decodes_and_prefills(_batch([2, 2, 0, 0]), 4, require_uniform=True) == (4, 0, 4, 0)


def test_extends_have_context_and_prefills_none() -> None:
    assert split_decodes_prefills_and_extends(_batch([1, 5, 6, 7], [9, 12, 6, 7])) == (
        1,
        1,
        2,
        1,
        5,
        13,
    )
    assert split_decodes_prefills_and_extends(_batch([1], [9])) == (1, 0, 0, 1, 0, 0)
    with pytest.raises(ContractError, match="request 2 has context, but follows a pure prefill"):
        split_decodes_prefills_and_extends(_batch([1, 5, 6], [9, 5, 12]))


def test_prefill_chunks_pack_greedily() -> None:
    assert split_prefill_chunks(torch.tensor([3, 4, 5, 1]), 8) == [(0, 2), (2, 4)]
    assert split_prefill_chunks(torch.tensor([8, 8]), 8, request_offset=3) == [(3, 4), (4, 5)]
    assert split_prefill_chunks(torch.tensor([], dtype=torch.int64), 8) == []
    with pytest.raises(ContractError, match=r"seq_lens\[1\]=9 exceeds workspace_size=8"):
        split_prefill_chunks(torch.tensor([1, 9]), 8)


class Rows:
    """A runner's batch that counts its swaps."""

    def __init__(self, tokens: list[int]) -> None:
        self.req_ids = [str(index) for index in range(len(tokens))]
        self.tokens = {str(index): count for index, count in enumerate(tokens)}
        self.swaps = 0

    def swap_states(self, first: int, second: int) -> None:
        self.swaps += 1
        self.req_ids[first], self.req_ids[second] = self.req_ids[second], self.req_ids[first]


@given(st.lists(st.integers(1, 6), max_size=12), st.integers(1, 4))
def test_reordering_moves_decodes_first_with_the_fewest_swaps(
    tokens: list[int], threshold: int
) -> None:
    rows = Rows(tokens)
    changed = reorder_batch_to_split_decodes_and_prefills(
        rows, SimpleNamespace(num_scheduled_tokens=rows.tokens), threshold
    )
    after = [rows.tokens[request] <= threshold for request in rows.req_ids]
    decodes = sum(after)
    assert after == [True] * decodes + [False] * (len(after) - decodes)
    misplaced = sum(count > threshold for count in tokens[:decodes])
    assert rows.swaps == misplaced and changed == (misplaced > 0)
