"""Chunked attention is causal attention over virtual requests."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.errors import ContractError
from attnlib.metadata.transforms import make_local_attention_virtual_batches


def _virtual(queries: list[int], sequences: list[int], chunk: int, block: int):
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    width = max(-(-s // block) for s in sequences) if sequences else 1
    table = torch.arange(len(queries) * width, dtype=torch.int32).view(len(queries), width)
    return table, make_local_attention_virtual_batches(
        chunk, starts, np.array(sequences, dtype=np.int32), table, block
    )


def test_an_example() -> None:
    """Requests of 4, 10 and 5 new tokens at lengths 6, 17 and 9 in chunks of 4."""
    table, (queries, starts, sequences, local) = _virtual([4, 10, 5], [6, 17, 9], 4, 2)
    assert queries.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert starts.tolist() == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    assert sequences.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert (
        local[1, 0] == table[0, 2]
        and local[2].tolist() == table[1, 2:4].tolist()
        and local.shape == (8, 2)
    )


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=4),
    st.sampled_from([(4, 2), (4, 4), (6, 3), (8, 1)]),
)
def test_each_token_sees_its_own_chunk_up_to_itself(requests: list, sizes: tuple) -> None:
    chunk, block = sizes
    queries, sequences = [q for q, _ in requests], [q + c for q, c in requests]
    table, (lengths, starts, seen, local) = _virtual(queries, sequences, chunk, block)
    assert starts[-1] == sum(queries)
    expected = []
    for request, (query_len, seq_len) in enumerate(zip(queries, sequences, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            keys = range(position // chunk * chunk, position + 1)
            expected.append(
                [int(table[request, key // block]) * block + key % block for key in keys]
            )
    found = []
    for virtual, length in enumerate(lengths):
        for index in range(length):
            keys = range(int(seen[virtual]) - int(length) + index + 1)
            found.append([int(local[virtual, key // block]) * block + key % block for key in keys])
    assert found == expected


def test_a_chunk_is_a_multiple_of_the_block() -> None:
    with pytest.raises(ContractError, match="attn_chunk_size=6 is not a multiple of block_size=4"):
        _virtual([1], [1], 6, 4)
