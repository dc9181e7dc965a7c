"""Batch notation: parsing, printing and errors."""

from __future__ import annotations

import pytest

from attnlib.errors import ContractError
from attnlib.testing.batch_spec import (
    NAMED_BATCHES,
    BatchSpec,
    named_batch,
    parse_batch,
    resolve_batch,
)


@pytest.mark.parametrize(
    ("text", "query_lens", "seq_lens", "padding"),
    [
        ("q2k", (2048,), (2048,), 0),
        ("8q1s1k", (1,) * 8, (1024,) * 8, 0),
        ("2q2k_8q1s1k", (2048,) * 2 + (1,) * 8, (2048,) * 2 + (1024,) * 8, 0),
        ("q5s0", (5,), (0,), 0),
        ("3q1s40_2q0s0_pad2", (1, 1, 1, 0, 0), (40, 40, 40, 0, 0), 2),
        ("empty", (), (), 0),
        ("pad3", (), (), 3),
    ],
)
def test_reads_counts_queries_sequences_and_padding(
    text: str, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], padding: int
) -> None:
    assert parse_batch(text) == BatchSpec(query_lens, seq_lens, padding)


def test_printed_batches_parse_to_the_same_batch() -> None:
    for block_size in (8, 16, 544):
        for name in NAMED_BATCHES:
            batch = named_batch(name, block_size)
            assert parse_batch(str(batch)) == batch, name


def test_page_edges_include_lengths_around_the_block_size() -> None:
    assert {15, 16, 17, 31, 32, 33} <= set(named_batch("page_edges", 16).seq_lens)


def test_graph_padding_has_padding_rows_and_padding_requests() -> None:
    batch = named_batch("graph_padding", 16)
    assert batch.num_tokens > batch.num_actual_tokens
    assert (0, 0) in zip(batch.query_lens, batch.seq_lens, strict=True)


@pytest.mark.parametrize("text", ["", "q", "8", "q1s", "q-1", "2q1_", "q1 s2", "q1m", "8Q1", "pad"])
def test_a_parse_error_shows_the_text_the_segment_and_the_grammar(text: str) -> None:
    with pytest.raises(
        ContractError, match=r"batch spec .*segment .*expected segments \[COUNT\]qQUERY"
    ):
        parse_batch(text)


def test_a_segment_with_zero_requests_is_an_error() -> None:
    with pytest.raises(ContractError, match="0 requests; drop it or write 'empty'"):
        parse_batch("0q1")


def test_an_unknown_name_lists_the_valid_names() -> None:
    with pytest.raises(ContractError, match="no batch is named 'decod'; the names are decode, "):
        named_batch("decod", 16)
    with pytest.raises(ContractError, match="or a name: decode, "):
        resolve_batch("decod", 16)


def test_invalid_lengths_are_named() -> None:
    with pytest.raises(ContractError, match=r"seq_lens\[1\] is -2"):
        BatchSpec((1, 1), (1, -2))
    with pytest.raises(ContractError, match="query_lens has 1 requests and seq_lens has 2"):
        BatchSpec((1,), (1, 2))
