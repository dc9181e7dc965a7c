"""What a case cannot do without: bytes of keys and values, and operations on the pairs that the mask lets through.

Rates are counted in necessary work, never in what a kernel happened to do: reading keys outside a window, or
multiplying what the mask then hides, makes a kernel slower and not busier.
"""

from __future__ import annotations

from collections.abc import Iterable

from attnlib.bench.case import DECODE_TOKENS, BenchCase

__all__ = ["flops", "kv_bytes", "read_keys", "roofline_us", "visible_pairs"]


def read_keys(query_len: int, seq_len: int, window: int | None) -> int:
    """Keys of one request that at least one of its queries sees (causal, M1, M2)."""
    if query_len == 0:
        return 0
    first = seq_len - query_len
    return seq_len if window is None else seq_len - max(first - window + 1, 0)


def visible_pairs(query_len: int, seq_len: int, window: int | None) -> int:
    """(query, key) pairs of one request that the mask shows: a query at position p sees min(p + 1, window) keys."""
    first, end = (
        seq_len - query_len + 1,
        seq_len,
    )  # keys that the first and the last query see without a window
    if window is None or end <= window:
        return (first + end) * query_len // 2
    if first >= window:
        return window * query_len
    rising = window - first  # queries that see fewer keys than the window has
    return (first + window - 1) * rising // 2 + window * (query_len - rising)


def kv_bytes(case: BenchCase) -> int:
    """Bytes of keys and values that must be read at least once."""
    return sum(_request_bytes(case, q, s) for q, s in _requests(case))


def flops(case: BenchCase) -> int:
    """Floating-point operations of both products over visible pairs: 2 * (D + Dv) * Hq for each."""
    return sum(_request_flops(case, q, s) for q, s in _requests(case))


def roofline_us(case: BenchCase, read_gbps: float, matmul_tflops: float) -> float:
    """The time that the ceilings allow: decodes at the read rate, prefills at whichever of the two takes longer."""
    total = 0.0
    for query_len, seq_len in _requests(case):
        memory = _request_bytes(case, query_len, seq_len) / read_gbps / 1e3
        products = _request_flops(case, query_len, seq_len) / matmul_tflops / 1e6
        total += memory if query_len <= DECODE_TOKENS else max(memory, products)
    return total


def _requests(case: BenchCase) -> Iterable[tuple[int, int]]:
    return zip(case.batch.query_lens, case.batch.seq_lens, strict=True)


def _request_bytes(case: BenchCase, query_len: int, seq_len: int) -> int:
    per_key = (
        case.num_kv_heads
        * (case.head_size + (case.head_size_v or case.head_size))
        * case.spec.kv_dtype.itemsize
    )
    return read_keys(query_len, seq_len, case.sliding_window) * per_key


def _request_flops(case: BenchCase, query_len: int, seq_len: int) -> int:
    per_pair = 2 * (case.head_size + (case.head_size_v or case.head_size)) * case.num_heads
    return visible_pairs(query_len, seq_len, case.sliding_window) * per_pair
