"""How many programs share the keys of one request in decode: pure arithmetic on upper bounds.

The grid, and so the workspace, has `num_splits` programs per request and block of rows. The kernel
decides on the device, from the lengths, how many of them get work (`kernels.schedule`). The bound
may therefore be generous for ragged batches, without cutting uniform batches into small splits.
"""

from __future__ import annotations

__all__ = [
    "LEAST_DIVIDED_KEYS",
    "MAX_CTAS_PER_SM",
    "MAX_SPLITS",
    "MIN_TILES_PER_SPLIT",
    "MOST_PREFILL_ROWS",
    "choose_num_splits",
    "choose_uniform_splits",
    "most_splits",
    "paged_decode_workspace_bytes",
    "prefill_splits",
    "prefill_workspace_bytes",
    "splits_of_keys",
    "splits_per_load",
    "visible_bound",
]

# The next four numbers are not tuned: they were chosen when the kernel was written (commits 009da5a
# and 9964770), each for the reason given. The decodes of benchmarks/results/h200 were measured with
# these values only. They apply to all chips and head sizes.

MAX_SPLITS = 256
"""Splits per request. With more, combining the partial results costs more than the splits save."""

MAX_CTAS_PER_SM = 4
"""Resident CTAs per multiprocessor that the number of splits is computed for. More do not increase
the memory throughput."""

MIN_TILES_PER_SPLIT = 2
"""Key tiles per split, so that one tile is loaded while another one is used."""

_MAX_WAVES = 4
"""Waves of CTAs in a grid of a ragged batch. CTAs without work exit immediately."""


LEAST_DIVIDED_KEYS = 2048
"""Prefills over fewer keys are not divided."""

_KEYS_PER_PREFILL_SPLIT = (512, 4096)
"""Keys of a split of a prefill, at least, where query tiles fill at most a quarter of the chip, and
where they fill more. On an H200 with 32/8 heads of 128, in microseconds
(benchmarks/results/h200/prefill_splits.json):

                      whole   2 splits   4      8
    1 x 64 over 8k    96.5    56.6       37.7   29.2
    1 x 128 over 4k   50.6    42.6       34.2   37.2
    4 x 32 over 8k    97.3    66.8       55.9   63.0
    8 x 32 over 4k    53.0    69.3       74.4   83.1
    2 x 128 over 16k  192     138        142    159
    1 x 256 over 100k 1077    604        665    731
"""

MOST_PREFILL_ROWS = 192
"""Query rows of a tile of any prefill, at most."""

_MOST_PREFILL_SPLITS = 32
"""Splits of a prefill, which write as many float32 outputs. Not tuned."""


def visible_bound(
    max_query_len: int,
    max_seq_len: int,
    window: tuple[int, int],
    causal: bool,
    attention_chunk_size: int,
) -> int:
    """Return the largest number of keys visible to the queries of one request together.

    Args:
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of the sequence lengths.
        window: (left, right); -1 is unbounded.
        causal: whether no query sees a later key.
        attention_chunk_size: positions per chunk; 0 is none.
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
    num_reqs: int, num_blocks: int, visible: int, block_n: int, max_resident_ctas: int
) -> int:
    """Return the upper bound of the splits per request.

    Args:
        num_reqs: requests of the batch.
        num_blocks: programs per request and split (KV heads times blocks of rows).
        visible: keys visible to a request's queries, an upper bound.
        block_n: keys per tile.
        max_resident_ctas: CTAs that the chip runs at the same time.

    Returns:
        1 if the requests alone fill the chip `_MAX_WAVES` times, or if there is nothing to share.
        Otherwise enough for one request to use the whole chip, limited to `_MAX_WAVES` waves of
        all requests together.
    """
    return splits_of_keys(visible, block_n, most_splits(num_reqs, num_blocks, max_resident_ctas))


def most_splits(num_reqs: int, num_blocks: int, max_resident_ctas: int) -> int:
    """Return the splits of requests with very many keys.

    Args:
        num_reqs, num_blocks, max_resident_ctas: see `choose_num_splits`.
    """
    alone = -(-max_resident_ctas // max(1, num_blocks))
    together = -(-_MAX_WAVES * max_resident_ctas // max(1, num_reqs * num_blocks))
    return max(1, min(alone, together, MAX_SPLITS))


def splits_of_keys(visible: int, block_n: int, most: int) -> int:
    """Return the splits of `visible` keys, at most `most`, in tiles of `block_n` keys."""
    splits = -(-visible // block_n) // MIN_TILES_PER_SPLIT
    return most if splits > most else splits if splits > 1 else 1


def choose_uniform_splits(
    num_programs: int, visible: int, block_n: int, max_resident_ctas: int
) -> int:
    """Return the splits of lists of keys of nearly equal lengths: as many as fill one wave.

    Args:
        num_programs: programs per split.
        visible: keys of a list, an upper bound.
        block_n: keys per tile.
        max_resident_ctas: CTAs that the chip runs at the same time.
    """
    most = -(-visible // block_n) // MIN_TILES_PER_SPLIT
    return max(1, min(most, max_resident_ctas // max(1, num_programs), MAX_SPLITS))


def prefill_splits(num_programs: int, max_seq_len: int, visible: int, num_sms: int) -> int:
    """Return how many programs share the keys of one query tile of a prefill: as many as fill the
    chip once, so that prefills whose query tiles fill more than half of it have one.

    Equal for all bounds of the sequence lengths in (2 ** k, 2 ** (k + 1)].

    Args:
        num_programs: query tiles times blocks of heads.
        max_seq_len: upper bound of the sequence lengths.
        visible: keys visible to a request's queries, an upper bound.
        num_sms: multiprocessors; a program of a prefill takes most of one.
    """
    least = 1 << max(0, (max_seq_len - 1).bit_length() - 1)
    keys = min(least, visible)
    if keys < LEAST_DIVIDED_KEYS:
        return 1
    few, many = _KEYS_PER_PREFILL_SPLIT
    most = keys // (many if 4 * num_programs > num_sms else few)
    return max(1, min(most, num_sms // max(1, num_programs), _MOST_PREFILL_SPLITS))


def paged_decode_workspace_bytes(
    num_tokens: int, num_heads: int, head_size_v: int, num_splits: int
) -> int:
    """Return the workspace of `paged_decode` in bytes; 0 for a single split.

    It holds float32 partial outputs, their LSEs, and the number of splits of each token's request.
    """
    if num_splits <= 1:
        return 0
    return 4 * (num_tokens * num_heads * num_splits * (head_size_v + 1) + num_tokens)


def prefill_workspace_bytes(
    num_tokens: int, num_heads: int, head_size_v: int, num_splits: int, num_sms: int
) -> int:
    """Return a bound of the workspace of prefills with at most `num_tokens` tokens and `num_splits`
    splits, in bytes: `prefill_splits` fills the chip with query tiles at most once."""
    rows = min(num_tokens * num_heads * num_splits, num_sms * MOST_PREFILL_ROWS)
    return 4 * (rows * (head_size_v + 1) + num_tokens)
