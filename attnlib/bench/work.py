"""Necessary work of a case: bytes of keys and values, and operations on the visible (query, key)
pairs.

Rates count necessary work only. Reading keys outside the window, or multiplying pairs that the mask
hides, does not increase the rate of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

from attnlib.bench.case import DECODE_TOKENS, BenchCase
from attnlib.spec import StateSpec

__all__ = [
    "flops",
    "kv_bytes",
    "read_keys",
    "roofline_us",
    "step_bytes",
    "surrounding_bytes",
    "visible_pairs",
]


def read_keys(query_len: int, seq_len: int, window: int | None) -> int:
    """Keys of one request that are visible to at least one of its queries (causal, M1, M2)."""
    if query_len == 0:
        return 0
    first = seq_len - query_len
    return seq_len if window is None else seq_len - max(first - window + 1, 0)


def visible_pairs(query_len: int, seq_len: int, window: int | None) -> int:
    """Visible (query, key) pairs of one request: the query at position p sees min(p + 1, window)
    keys.
    """
    # Without a window, the first query sees `first` keys and the last one `end` keys.
    first, end = seq_len - query_len + 1, seq_len
    if window is None or end <= window:
        return (first + end) * query_len // 2
    if first >= window:
        return window * query_len
    rising = window - first  # queries that see fewer keys than the window
    return (first + window - 1) * rising // 2 + window * (query_len - rising)


def kv_bytes(case: BenchCase) -> int:
    """Bytes of keys and values that must be read; latents hold both."""
    return sum(_request_bytes(case, q, s) for q, s in _requests(case))


def flops(case: BenchCase) -> int:
    """Floating-point operations of both products over visible pairs: 2 * (D + Dv) * Hq for each."""
    return sum(_request_flops(case, q, s) for q, s in _requests(case))


def roofline_us(case: BenchCase, read_gbps: float, matmul_tflops: float) -> float:
    """Least time at the peak rates: decodes by bytes read, prefills by the longer of bytes and
    operations.
    """
    total = 0.0
    for query_len, seq_len in _requests(case):
        memory = _request_bytes(case, query_len, seq_len) / read_gbps / 1e3
        products = _request_flops(case, query_len, seq_len) / matmul_tflops / 1e6
        total += memory if query_len <= DECODE_TOKENS else max(memory, products)
    return total


def _requests(case: BenchCase) -> Iterable[tuple[int, int]]:
    return case.batch.lengths


def _request_bytes(case: BenchCase, query_len: int, seq_len: int) -> int:
    per_key = case.spec.kv_bytes_per_token
    if case.key_selection is not None:  # the lists of queries overlap in an unknown share
        keys = min(seq_len, query_len * case.key_selection.max_keys)
        return keys * per_key
    keys = read_keys(query_len, seq_len, case.sliding_window)
    if case.entries is not None:  # the lists of queries overlap in an unknown share
        rate, _, most = case.entries
        visible = seq_len // rate
        keys += min(visible, query_len * most) if most else visible
    return keys * per_key


def _request_flops(case: BenchCase, query_len: int, seq_len: int) -> int:
    per_pair = 2 * (case.head_size + (case.head_size_v or case.head_size)) * case.num_heads
    window = case.sliding_window
    if case.key_selection is not None:  # as many keys as a window of this size shows
        window = min(window or case.key_selection.max_keys, case.key_selection.max_keys)
    pairs = visible_pairs(query_len, seq_len, window) if case.causal else query_len * seq_len
    if case.entries is not None:
        rate, _, most = case.entries
        for p in range(seq_len - query_len, seq_len):
            visible = (p + 1) // rate
            pairs += min(visible, most) if most else visible
    return pairs * per_pair


def step_bytes(spec: StateSpec, computed: int, query_len: int) -> int:
    """Bytes that a step of one request over states must move in the tail form: the state and the
    tail, the new inputs, the outputs, and the state again where a chunk is full.

    Args:
        spec: of the layer, with a chunk size.
        computed: tokens before the step, all of which stay; those since the last full chunk are in
            the tail.
        query_len: new tokens.
    """
    assert spec.chunk_size is not None
    size, chunk, end = spec.dtype.itemsize, spec.chunk_size, computed + query_len
    state = spec.num_heads * spec.key_size * spec.value_size * spec.state_dtype.itemsize
    channels = {"head": 1, "channel": spec.key_size, "constant": 0}[spec.decay]
    keys, values = spec.num_key_heads * spec.key_size, spec.num_heads * spec.value_size
    gates = 4 * spec.num_heads * (channels + spec.has_beta)
    row = size * (keys + values) + gates
    base = computed // chunk * chunk
    kept = max(computed, end - spec.max_rollback) // chunk * chunk
    written = end - max(kept, computed)
    moved = (computed - base + query_len + written) * row + query_len * size * (keys + values)
    return moved + state * ((base > 0) + (kept > base))


def surrounding_bytes(spec: StateSpec, query_len: int) -> int:
    """Bytes that a step of one request must move besides those of its recurrence: the window is
    read and written, and the output gate is read."""
    window = spec.conv_channels * (spec.conv_width - 1 + query_len)
    return spec.dtype.itemsize * (window + query_len * spec.num_heads * spec.value_size)
