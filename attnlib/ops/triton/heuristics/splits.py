"""How many programs may share the keys of one request in decode: pure arithmetic on upper bounds.

The grid, and so the workspace, has `num_splits` programs per request and group of heads. How many of them find work is
settled on the device from the lengths themselves (`schedule.tiles_per_split`), so the bound may be generous for ragged
batches without cutting even ones too small. The numbers, their reasons and where they come from: `tables/decode.json`.
"""

from __future__ import annotations

import math

from attnlib.ops.triton.heuristics.decode_numbers import decode_numbers

__all__ = [
    "MIN_TILES_PER_SPLIT",
    "RESIDENT_LIMIT",
    "SPLIT_LIMIT",
    "choose_num_splits",
    "paged_decode_workspace_bytes",
    "visible_bound",
]

_NUMBERS = decode_numbers()

SPLIT_LIMIT = _NUMBERS["split_limit"]
"""Pieces that one request is cut into at most."""

RESIDENT_LIMIT = _NUMBERS["resident_limit"]
"""Programs of a multiprocessor that splits are reckoned with at most."""

MIN_TILES_PER_SPLIT = _NUMBERS["min_tiles_per_split"]
"""Key tiles that one split takes at least."""

_WAVES = _NUMBERS["waves"]
"""How many times over the grid may fill the chip when lengths are ragged."""


def visible_bound(
    max_query_len: int,
    max_seq_len: int,
    window: tuple[int, int],
    causal: bool,
    attention_chunk_size: int,
) -> int:
    """The most keys that the queries of one request can see together.

    Args:
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of the sequence lengths.
        window: (left, right); -1 is unbounded.
        causal: whether no query sees a later key.
        attention_chunk_size: 0 is none.
    """
    bound = max_seq_len
    left, right = window[0], 0 if causal else window[1]
    if left >= 0 and right >= 0:
        bound = min(bound, left + right + max_query_len)
    if attention_chunk_size > 0:
        bound = min(bound, attention_chunk_size + max_query_len - 1)
    return max(bound, 0)


def splits_per_load(rows: int, width: int) -> int:
    """Return how many partial results [rows, width] a warpgroup loads at the same time.

    As many as fit in 64 registers of each of its 128 threads, at least 1 and at most 16.

    Args:
        rows: rows of a partial result.
        width: padded head size of the values.
    """
    return max(1, min(16, 64 * 128 // (rows * width)))


def choose_num_splits(
    num_reqs: int, num_groups: int, visible: int, block_n: int, slots: int
) -> int:
    """The bound on splits per request.

    Args:
        num_reqs: requests of the batch.
        num_groups: programs per request and split (KV heads times row blocks).
        visible: the most keys that a request's queries see.
        block_n: keys per tile.
        slots: programs that the chip runs at a time.

    Returns:
        1 when the requests alone fill the chip `_WAVES` times or when there is nothing to share; otherwise enough for
        one request to spread over the whole chip, limited by `_WAVES` fillings of it by all requests together.
    """
    pairs = max(1, num_reqs * num_groups)
    pieces = math.ceil(visible / block_n) // MIN_TILES_PER_SPLIT
    alone = math.ceil(slots / max(1, num_groups))
    together = math.ceil(_WAVES * slots / pairs)
    return max(1, min(pieces, alone, together, SPLIT_LIMIT))


def paged_decode_workspace_bytes(
    num_tokens: int, num_heads: int, head_size_v: int, num_splits: int
) -> int:
    """Bytes that `paged_decode` needs beside its output: float32 partial outputs and their LSEs, and one split count
    per token's request. 0 for a single split."""
    if num_splits <= 1:
        return 0
    return 4 * (num_tokens * num_heads * num_splits * (head_size_v + 1) + num_tokens)
