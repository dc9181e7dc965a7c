"""How the results of a split over latents are written, by two consumer warpgroups."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.kv_scales import factor_without_keys
from attnlib.ops.triton.hopper.kernels.latent_rows import normalizers, query_rows

__all__ = ["store_split"]


@gluon.jit
def _store_half(acc, factor, rows, split, place, outputs, partials, START: gl.constexpr):
    """Write one half of the results: the output of a single split, else a partial result.

    Args:
        factor: of the accumulators, see `normalizers`.
        rows: in the layout of the accumulators.
    """
    valid = rows.exist(split.query_len)
    offsets = outputs.offsets(split.start + rows.token, rows.head)
    partial_offsets = rows.partial_offsets(partials, place)
    lanes = START + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    result = acc * factor[:, None]
    mask = valid[:, None] & (lanes >= 0)[None, :]
    if place.num_splits == 1:
        pointers = outputs.pointer + offsets[:, None] + lanes[None, :]
        gl.store(pointers, result.to(outputs.pointer.dtype.element_ty), mask=mask)
    else:
        gl.store(partials.values + partial_offsets[:, None] + lanes[None, :], result, mask=mask)


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
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    factor = gl.convert_layout(factor, OUT_ROW)
    out_rows = query_rows(gl.arange(0, CONFIG.ROWS, OUT_ROW), block, CONFIG)
    START: gl.constexpr = CONSUMER * (CONFIG.DV // 2)
    _store_half(acc, factor, out_rows, split, place, outputs, partials, START)
