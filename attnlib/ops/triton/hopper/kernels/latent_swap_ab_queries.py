"""The query rows of a consumer that decodes over latents in quarters of a tile.

Over 8-bit caches they become float16, in the order of the elements of converted keys, each row
times a power of two; its scores are multiplied by the inverse (`quantized.query_powers`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.column_softmax import store_columns
from attnlib.ops.triton.hopper.kernels.compat import partition_barrier
from attnlib.ops.triton.hopper.kernels.latent_bytes import quarter_order
from attnlib.ops.triton.hopper.kernels.latent_rows import copy_queries, query_offsets, query_rows
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_memory import QUARTERS
from attnlib.ops.triton.hopper.kernels.quantized import query_columns, query_powers
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["copy_split_queries", "plain_rows"]


@gluon.constexpr_function
def _copy_layout(width):
    """Return the layout of [rows, width] in which a thread has 8 elements of a row."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _load_part(queries, split, block, columns, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Load elements `columns` of the query rows from FIRST on; 0 for rows that do not exist."""
    LAYOUT: gl.constexpr = columns.type.layout.parent
    rows = query_rows(FIRST + gl.arange(0, CONFIG.ROWS, gl.SliceLayout(1, LAYOUT)), block, CONFIG)
    offsets = query_offsets(queries, rows, split.start)
    valid = rows.exist(split.query_len)
    pointers = queries.pointer + offsets[:, None] + columns[None, :]
    return gl.load(pointers, mask=valid[:, None], other=0.0)


@gluon.jit
def _scale_part(target, part, power):
    """Store a part of the queries in shared memory, each row times its power of two."""
    power = gl.convert_layout(power, gl.SliceLayout(1, part.type.layout))
    target.store((part.to(gl.float32) * power[:, None]).to(target.dtype))


@gluon.jit
def _copy_scaled_queries(
    queries, split, block, memory, key_scale, FIRST: gl.constexpr, CONFIG: gl.constexpr
):
    """Copy the queries of a split over an 8-bit cache, and the factors of its scores."""
    WIDTH: gl.constexpr = CONFIG.DV // QUARTERS
    WIDE: gl.constexpr = _copy_layout(WIDTH)
    NARROW: gl.constexpr = _copy_layout(CONFIG.ROTARY)
    ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    if CONFIG.GROUP_SCALES:
        order = gl.arange(0, CONFIG.ROTARY, gl.SliceLayout(0, NARROW))
    else:
        order = query_columns(CONFIG.ROTARY, gl.SliceLayout(0, NARROW))
    rotary = _load_part(queries, split, block, CONFIG.DV + order, FIRST, CONFIG)
    largest = gl.convert_layout(gl.max(gl.abs(rotary.to(gl.float32)), 1), ROW)
    columns = quarter_order(gl.SliceLayout(0, WIDE))
    parts = ()
    for quarter in gl.static_range(QUARTERS):
        part = _load_part(queries, split, block, quarter * WIDTH + columns, FIRST, CONFIG)
        largest = gl.maximum(largest, gl.max(gl.abs(part.to(gl.float32)), 1))
        parts = parts + (part,)
    power, inverse = query_powers(largest)
    for quarter in gl.static_range(QUARTERS):
        _scale_part(memory.queries.index(quarter), parts[quarter], power)
    _scale_part(memory.query_rotary.index(0), rotary, power)
    store_columns(memory.factors, inverse * key_scale)


@gluon.jit
def plain_rows(CONFIG: gl.constexpr):
    """Return the numbers of the rows of a consumer over a 16-bit cache."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    return gl.arange(0, CONFIG.ROWS, gl.SliceLayout(1, COPY))


@gluon.jit
def copy_split_queries(
    queries, row, split, block, memory, key_scale, FIRST: gl.constexpr, CONFIG: gl.constexpr
):
    """Copy the queries of a split to shared memory.

    Args:
        row: [ROWS], numbers of the rows of a 16-bit cache, in the layout of `plain_rows`.
        block: of query rows.
        key_scale: scale of the keys of an 8-bit cache.
        FIRST: number of the first row of the consumer in the block.
    """
    WIDTH: gl.constexpr = CONFIG.DV // QUARTERS
    # All warps are done with the tiles and queries of the split before.
    partition_barrier()
    if CONFIG.KV_KIND == KV_PLAIN:
        rows = query_rows(row, block, CONFIG)
        offsets = query_offsets(queries, rows, split.start)
        valid = rows.exist(split.query_len)
        for quarter in gl.static_range(QUARTERS):
            copy_queries(memory.queries.index(quarter), queries, offsets, valid, quarter * WIDTH)
        copy_queries(memory.query_rotary.index(0), queries, offsets, valid, CONFIG.DV)
    else:
        _copy_scaled_queries(queries, split, block, memory, key_scale, FIRST, CONFIG)
    # WGMMA reads shared memory through the async proxy: fence, then wait for all warps.
    fence_async_shared()
    partition_barrier()
