"""How the results of a split over latents are written, by two consumer warpgroups."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier, reinterpret
from attnlib.ops.triton.hopper.kernels.kv_scales import factor_without_keys
from attnlib.ops.triton.hopper.kernels.latent_rows import normalizers, query_rows
from attnlib.ops.triton.hopper.kernels.prefill_rows import store_layout, store_rows

__all__ = ["store_split"]

_COLUMNS = gl.constexpr(64)
"""Elements of an output row that are loaded from shared memory and stored together."""


@gluon.jit
def _store_output(result, split, outputs, queries, CONFIG: gl.constexpr, START: gl.constexpr):
    """Write one half of the output, [rows, elements] from START on, through the memory of a half of
    the queries, which both consumers have used (`LatentTiles.total_sum`).

    Accumulators have pairs of elements, whose stores of half a sector took 12.6 us of a decode of
    128 x 2k on an H200.
    """
    DTYPE: gl.constexpr = outputs.pointer.dtype.element_ty
    SHAPE: gl.constexpr = queries.shape
    LAYOUT: gl.constexpr = store_layout(_COLUMNS)
    memory = reinterpret(queries, DTYPE, SHAPE, gl.NVMMASharedLayout.get_default_for(SHAPE, DTYPE))
    memory.store(result.to(DTYPE))
    partition_barrier()
    rows = query_rows(gl.arange(0, SHAPE[0], gl.SliceLayout(1, LAYOUT)), split.kv_head, CONFIG)
    offsets = outputs.offsets(split.start + rows.token, rows.head) + START
    valid = rows.exist(split.query_len)
    PARTS: gl.constexpr = SHAPE[1] // _COLUMNS
    for part in gl.static_range(PARTS):
        content = memory.slice(part * _COLUMNS, _COLUMNS, 1).load(LAYOUT)
        store_rows(outputs.pointer, offsets + part * _COLUMNS, content, valid, _COLUMNS)
    # The queries of the next split follow.
    partition_barrier()


@gluon.jit
def _store_half(
    acc,
    factor,
    split,
    place,
    outputs,
    partials,
    queries,
    CONFIG: gl.constexpr,
    START: gl.constexpr,
):
    """Write one half of the results: the output of a single split, else a partial result.

    Args:
        factor: of the accumulators, see `normalizers`.
        queries: the memory of a half of them.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    result = acc * gl.convert_layout(factor, ROW)[:, None]
    if place.num_splits == 1:
        _store_output(result, split, outputs, queries, CONFIG, START)
    else:
        rows = query_rows(gl.arange(0, CONFIG.ROWS, ROW), split.kv_head, CONFIG)
        offsets = rows.partial_offsets(partials, place)
        lanes = START + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        mask = rows.exist(split.query_len)[:, None] & (lanes >= 0)[None, :]
        gl.store(partials.values + offsets[:, None] + lanes[None, :], result, mask=mask)


@gluon.jit
def store_split(
    acc,
    row_max,
    row_sum,
    rows,
    split,
    place,
    outputs,
    partials,
    value_scale,
    tiles,
    CONFIG: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Write one half of the results of a split, and consumer 0 the LSEs and the header."""
    block = split.kv_head
    valid = rows.exist(split.query_len)
    if CONSUMER == 0 and not CONFIG.WHOLE:
        if split.skipped == 0:
            header = rows.header(place)
            token = split.start + rows.token
            gl.store(
                partials.headers + token * CONFIG.HEAD_BLOCKS + block % CONFIG.HEAD_BLOCKS,
                header,
                mask=valid & (rows.row % CONFIG.GROUP == 0),
            )
    factor = normalizers(
        row_max, row_sum, rows, valid, split, place, outputs, partials, CONSUMER == 0
    )
    if CONFIG.CONVERTS:
        # The sums of both consumers, and 0 in rows without keys.
        factor = factor * factor_without_keys(value_scale, row_sum == 0.0, CONFIG.V_SCALE_KIND)
    half = tiles.queries.high.index(0) if CONSUMER else tiles.queries.low.index(0)
    START: gl.constexpr = CONSUMER * (CONFIG.DV // 2)
    _store_half(acc, factor, split, place, outputs, partials, half, CONFIG, START)
