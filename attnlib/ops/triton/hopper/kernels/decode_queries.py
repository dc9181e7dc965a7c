"""The query rows of a split of the Hopper decode, from global to shared memory.

Over quantized caches they become float16, in the order of the keys' elements. bfloat16 queries may
be outside of float16's range: each row is multiplied by a power of two, and its scores by the
inverse (`quantized.query_powers`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.column_softmax import store_columns
from attnlib.ops.triton.hopper.kernels.compat import partition_barrier
from attnlib.ops.triton.hopper.kernels.int4 import int4_query_columns
from attnlib.ops.triton.hopper.kernels.quantized import query_columns, query_powers
from attnlib.ops.triton.kernels.quant import KV_INT4

__all__ = ["load_queries", "query_layout", "query_offsets", "send_queries", "store_queries"]

_ROWS = gl.constexpr(8)
"""Rows that one warp holds in registers at a time."""


@gluon.constexpr_function
def query_layout(width, warps):
    """Return the layout of [rows, width] in which a thread loads 16 bytes of a row."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def query_offsets(
    start, query_len, kv_head, first_row, stride_qt, stride_qh, GROUP: gl.constexpr,
    TILE_TOKENS: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return (offsets of ROWS query rows, whether they exist) in the rows of LAYOUT.

    Rows are query heads of a group times query tokens.
    """
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    valid = (rows < TILE_TOKENS * GROUP) & (rows // GROUP < query_len)
    offsets = (start + rows // GROUP).to(gl.int64) * stride_qt + (
        kv_head * GROUP + rows % GROUP
    ).to(gl.int64) * stride_qh
    # The launcher checks 16-byte alignment; the shifts tell the compiler.
    return (offsets >> 3) << 3, valid


@gluon.jit
def load_queries(
    query, start, query_len, kv_head, first_row, stride_qt, stride_qh, GROUP: gl.constexpr,
    D: gl.constexpr, TILE_TOKENS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr,
    LAYOUT: gl.constexpr, KV_KIND: gl.constexpr,
):  # fmt: skip
    """Return (scaled float16 queries, inverse powers [ROWS]): one tensor [ROWS, WIDTH], or those of
    four groups over 4-bit integers, [ROWS, WIDTH] each."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    offsets, valid = query_offsets(
        start, query_len, kv_head, first_row, stride_qt, stride_qh, GROUP, TILE_TOKENS, ROWS, LAYOUT
    )
    if KV_KIND == KV_INT4:
        columns = int4_query_columns(WIDTH, COLUMN)
        pointers = query + offsets[:, None] + columns[None, :]
        q0 = gl.load(pointers, mask=valid[:, None], other=0.0).to(gl.float32)
        q1 = gl.load(pointers + D // 4, mask=valid[:, None], other=0.0).to(gl.float32)
        q2 = gl.load(pointers + D // 2, mask=valid[:, None], other=0.0).to(gl.float32)
        q3 = gl.load(pointers + D // 4 * 3, mask=valid[:, None], other=0.0).to(gl.float32)
        largest = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.abs(q2))
        power, inverse = query_powers(gl.max(gl.maximum(largest, gl.abs(q3)), 1))
        scaled = (
            (q0 * power[:, None]).to(gl.float16), (q1 * power[:, None]).to(gl.float16),
            (q2 * power[:, None]).to(gl.float16), (q3 * power[:, None]).to(gl.float16),
        )  # fmt: skip
    else:
        columns = query_columns(WIDTH, COLUMN)
        q = gl.load(
            query + offsets[:, None] + columns[None, :],
            mask=valid[:, None] & (columns < D)[None, :],
            other=0.0,
        ).to(gl.float32)
        power, inverse = query_powers(gl.max(gl.abs(q), 1))
        scaled = ((q * power[:, None]).to(gl.float16),)
    return scaled, inverse


@gluon.jit
def store_queries(q_tile, scaled, KV_KIND: gl.constexpr):
    """Store the queries of `load_queries` in shared memory."""
    if KV_KIND == KV_INT4:
        for group in gl.static_range(4):
            q_tile.index(group).store(scaled[group])
    else:
        q_tile.store(scaled[0])


@gluon.jit
def send_queries(
    query, k_scale, start, query_len, kv_head, split, stride_qt, stride_qh, q_tile, factors,
    barriers, GROUP: gl.constexpr, D: gl.constexpr, TILE_TOKENS: gl.constexpr,
    KV_KIND: gl.constexpr,
):  # fmt: skip
    """Load the queries of a split, and store them once the consumer has used those of the previous
    one. One warp. Not for 4-bit integers.

    Args:
        k_scale: scale of the keys of this head.
        split: number of splits before this one.
        q_tile: [rows, width].
        factors: [1, rows]; factors of the scores.
        barriers: (full, empty) of `q_tile` and `factors`, [2, 1].
    """
    ROWS: gl.constexpr = q_tile.shape[-2]
    WIDTH: gl.constexpr = q_tile.shape[-1]
    LAYOUT: gl.constexpr = query_layout(WIDTH, 1)
    for first in gl.static_range(0, ROWS, _ROWS):
        scaled, inverse = load_queries(
            query, start, query_len, kv_head, first, stride_qt, stride_qh, GROUP, D, TILE_TOKENS,
            WIDTH, _ROWS, LAYOUT, KV_KIND)  # fmt: skip
        if first == 0:
            # The parity is inverted, so that the first split does not wait.
            mbarrier.wait(barriers.index(1), (split & 1) ^ 1)
        q_tile.slice(first, _ROWS, 0).store(scaled[0])
        store_columns(factors.slice(first, _ROWS, 1), inverse * k_scale)
    # WGMMA reads shared memory through the async proxy.
    fence_async_shared()
    partition_barrier()
    mbarrier.arrive(barriers.index(0), count=1)
