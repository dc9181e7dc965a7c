"""The query rows of a split of the Hopper decode, from global to shared memory.

Over quantized caches they become float16, in the order of the keys' elements. bfloat16 queries may
be outside of float16's range: each row is multiplied by a power of two, and its scores by the
inverse (`quantized.query_powers`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.column_softmax import store_columns
from attnlib.ops.triton.hopper.kernels.compat import partition_barrier, prefetch_l1
from attnlib.ops.triton.hopper.kernels.int4 import int4_query_columns
from attnlib.ops.triton.hopper.kernels.quantized import query_columns, query_powers
from attnlib.ops.triton.hopper.kernels.rotation import (
    key_group_levels,
    key_levels,
    rotate_parts,
    twice,
)
from attnlib.ops.triton.kernels.quant import KV_INT4, KV_PLAIN

__all__ = [
    "load_plain_queries",
    "prefetch_queries",
    "prepare_queries",
    "query_layout",
    "scaled_queries",
]


@gluon.constexpr_function
def query_layout(width, warps):
    """Return the layout of [rows, width] in which a thread loads 16 bytes of a row."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def _turned_layout(width, warps):
    """Return the layout of 4 rows [4, width] that are rotated: few elements for each thread."""
    if warps == 1:
        return gl.BlockedLayout([1, width // 8], [4, 8], [1, 1], [1, 0])
    return gl.BlockedLayout([1, width // 32], [1, 32], [4, 1], [1, 0])


@gluon.jit
def prefetch_queries(
    queries, token, kv_head, GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr
):
    """Prefetch the query rows of the split that begins at `token` into L1.

    A split begins with the load of its queries. Where requests have few key tiles, no other work of
    the warpgroup hides that latency.
    """
    LINES: gl.constexpr = (D + 63) // 64  # of 128 bytes, in a row
    LANES: gl.constexpr = max(128, ROWS * ((D + 127) // 128 * 2))
    index = gl.arange(0, LANES, gl.BlockedLayout([LANES // 128], [32], [4], [0]))
    row = index // LINES % ROWS
    tokens = gl.minimum(token + row // GROUP, queries.num_tokens - 1).to(gl.int64)
    heads = (kv_head * GROUP + row % GROUP).to(gl.int64)
    offsets = tokens * queries.stride_token
    prefetch_l1(queries.pointer + offsets + heads * queries.stride_head + index % LINES * 64)


@gluon.jit
def _row_offsets(queries, split, first_row, ROWS: gl.constexpr, LAYOUT: gl.constexpr, config):
    """Return (offsets of ROWS query rows, whether they exist) in the rows of LAYOUT.

    Rows are query heads of a group times query tokens.
    """
    GROUP: gl.constexpr = config.GROUP
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    valid = (rows < config.TILE_TOKENS * GROUP) & (rows // GROUP < split.query_len)
    offsets = (split.start + rows // GROUP).to(gl.int64) * queries.stride_token
    offsets += (split.kv_head * GROUP + rows % GROUP).to(gl.int64) * queries.stride_head
    # The launcher checks 16-byte alignment; the shifts tell the compiler.
    return (offsets >> 3) << 3, valid


@gluon.jit
def load_plain_queries(queries, split, ROWS: gl.constexpr, WIDTH: gl.constexpr, config):
    """Return the query rows [ROWS, WIDTH] of a split; 0 where there is none. One warpgroup."""
    LAYOUT: gl.constexpr = query_layout(WIDTH, 4)
    offsets, valid = _row_offsets(queries, split, 0, ROWS, LAYOUT, config)
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    return gl.load(
        queries.pointer + offsets[:, None] + columns[None, :],
        mask=valid[:, None] & (columns < config.D)[None, :],
        other=0.0,
    )


@gluon.jit
def _rotated(parts, elements, queries, LEVELS: gl.constexpr, config):
    """Return rotated queries in float32; arguments as of `rotate_parts`."""
    DTYPE: gl.constexpr = queries.pointer.dtype.element_ty
    rotated = rotate_parts(parts, elements, config.K_SIGNS, config.D, LEVELS, False, DTYPE)
    wide = ()
    for part in gl.static_range(len(parts)):
        wide = wide + (rotated[part].to(gl.float32),)
    return wide


@gluon.jit
def _load_scaled_queries(
    queries, split, first_row, WIDTH: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr, config
):
    """Return (scaled float16 queries, inverse powers [ROWS]): one tensor [ROWS, WIDTH], or those of
    four groups over 4-bit integers, [ROWS, WIDTH] each."""
    D: gl.constexpr = config.D
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    offsets, valid = _row_offsets(queries, split, first_row, ROWS, LAYOUT, config)
    if config.K_KIND == KV_INT4:
        columns = int4_query_columns(WIDTH, COLUMN)
        pointers = queries.pointer + offsets[:, None] + columns[None, :]
        q0 = gl.load(pointers, mask=valid[:, None], other=0.0).to(gl.float32)
        q1 = gl.load(pointers + D // 4, mask=valid[:, None], other=0.0).to(gl.float32)
        q2 = gl.load(pointers + D // 2, mask=valid[:, None], other=0.0).to(gl.float32)
        q3 = gl.load(pointers + D // 4 * 3, mask=valid[:, None], other=0.0).to(gl.float32)
        if config.K_SIGNS:
            elements = (columns, columns + D // 4, columns + D // 2, columns + D // 4 * 3)
            q0, q1, q2, q3 = _rotated(
                (q0, q1, q2, q3), elements, queries, key_group_levels(WIDTH, D), config
            )
        largest = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.abs(q2))
        power, inverse = query_powers(gl.max(gl.maximum(largest, gl.abs(q3)), 1))
        scaled = (
            (q0 * power[:, None]).to(gl.float16),
            (q1 * power[:, None]).to(gl.float16),
            (q2 * power[:, None]).to(gl.float16),
            (q3 * power[:, None]).to(gl.float16),
        )
    else:
        columns = query_columns(WIDTH, COLUMN)
        q = gl.load(
            queries.pointer + offsets[:, None] + columns[None, :],
            mask=valid[:, None] & (columns < D)[None, :],
            other=0.0,
        ).to(gl.float32)
        if config.K_SIGNS:
            (q,) = _rotated((q,), (columns,), queries, key_levels(WIDTH, D), config)
        power, inverse = query_powers(gl.max(gl.abs(q), 1))
        scaled = ((q * power[:, None]).to(gl.float16),)
    return scaled, inverse


@gluon.jit
def scaled_queries(
    queries, split, first_row, WIDTH: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, config
):
    """`_load_scaled_queries` of ROWS rows. Where 4 of 8 are rotated, the others repeat them, and
    the inverse powers are [ROWS, 1]."""
    if config.HALF_ROWS:
        LAYOUT: gl.constexpr = _turned_layout(WIDTH, WARPS)
        half, powers = _load_scaled_queries(
            queries, split, first_row, WIDTH, ROWS // 2, LAYOUT, config
        )
        scaled = ()
        for part in gl.static_range(len(half)):
            scaled = scaled + (twice(half[part]),)
        inverse = twice(powers[:, None])
    else:
        scaled, inverse = _load_scaled_queries(
            queries, split, first_row, WIDTH, ROWS, query_layout(WIDTH, WARPS), config
        )
    return scaled, inverse


@gluon.jit
def _store_scaled_queries(q_tile, scaled, K_KIND: gl.constexpr):
    """Store the queries of `_load_scaled_queries` in shared memory."""
    if K_KIND == KV_INT4:
        for group in gl.static_range(4):
            q_tile.index(group).store(scaled[group])
    else:
        q_tile.store(scaled[0])


@gluon.jit
def prepare_queries(call, worker, split, key_scale):
    """Bring the queries of a split to shared memory, with the factors of its scores. The consumer.

    Args:
        call: `DecodeCall`.
        worker: `Worker`.
        key_scale: scale of the keys of this head; over quantized caches.
    """
    q_tile = worker.q_tile
    config: gl.constexpr = call.config
    ROWS: gl.constexpr = q_tile.shape[-2]
    WIDTH: gl.constexpr = q_tile.shape[-1]
    if config.K_KIND != KV_PLAIN:
        scaled, inverse = scaled_queries(call.queries, split, 0, WIDTH, ROWS, 4, config)
        store_columns(worker.factors, inverse * key_scale)
        # All warps have exchanged maxima since they used the previous split's queries.
        _store_scaled_queries(q_tile, scaled, config.K_KIND)
    else:
        rows = load_plain_queries(call.queries, split, ROWS, WIDTH, config)
        # All warps are done with the previous split's queries before they are overwritten.
        partition_barrier()
        q_tile.store(rows)
    fence_async_shared()
    partition_barrier()
