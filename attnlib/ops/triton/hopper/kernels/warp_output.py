"""The results of a split of the decode of one warp."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import (
    store_in_l2,
)
from attnlib.ops.triton.hopper.kernels.kv_scales import factor_without_keys
from attnlib.ops.triton.hopper.kernels.quantized import sum_exponent, value_unit
from attnlib.ops.triton.hopper.kernels.rotation import rotate_parts, value_part_levels
from attnlib.ops.triton.hopper.kernels.softmax import add_sink
from attnlib.ops.triton.hopper.kernels.warp_operands import (
    PRODUCTS,
    num_parts,
    value_elements,
)
from attnlib.ops.triton.hopper.kernels.warp_products import (
    scale_parts,
)

__all__ = [
    "store_split",
]


@gluon.jit
def _rotated_back(acc, index, DTYPE: gl.constexpr, config):
    """Return outputs [words, rows] of parts rotated back (P15), after rounding as outputs are."""
    PARTS: gl.constexpr = len(acc)
    WORDS: gl.constexpr = acc[0].shape[0]
    LEVELS: gl.constexpr = value_part_levels(WORDS, config.DV, config.V_KIND)
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.permute(acc[0], (1, 0)).type.layout)
    parts = ()
    places = ()
    for part in gl.static_range(PARTS):
        parts = parts + (gl.permute(acc[part].to(DTYPE).to(gl.float32), (1, 0)),)
        elements = value_elements(index, part, WORDS, config.V_KIND)
        places = places + (gl.convert_layout(elements, LAYOUT, assert_trivial=True),)
    rotated = rotate_parts(parts, places, config.V_SIGNS, config.DV, LEVELS, True, DTYPE)
    found = ()
    for part in gl.static_range(PARTS):
        back = gl.permute(rotated[part], (1, 0))
        found = found + (gl.convert_layout(back, PRODUCTS, assert_trivial=True),)
    return found


@gluon.jit
def store_split(call, split, sums, num_splits, skipped, follows):
    """Write the outputs of a request that has one split, else the partial results of this one.

    Args:
        skipped: tiles of the request before the split.
        follows: the split is not the first one of the range of this CTA.
    """
    config: gl.constexpr = call.config
    partials = call.partials
    PARTS: gl.constexpr = num_parts(config.V_KIND)
    UNIT: gl.constexpr = value_unit(config.V_KIND)
    WORDS: gl.constexpr = config.WIDTH_V // PARTS
    ROWS: gl.constexpr = config.ROWS
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCTS)
    row = gl.arange(0, config.ROWS, COLUMN)
    token = row // config.GROUP
    head = split.kv_head * config.GROUP + row % config.GROUP
    valid = (row < config.TILE_TOKENS * config.GROUP) & (token < split.query_len)
    partial_index = 2 * gl.program_id(0) + follows.to(gl.int32)
    if skipped == 0:
        # The CTA with a request's first tile tells the combine kernel how many splits there are and
        # where the first partial result is.
        header = (partial_index << 15) | (token * config.GROUP << 9) | num_splits
        gl.store(
            partials.headers + (split.start + token) * config.NUM_KV_HEADS + split.kv_head,
            header,
            mask=valid & (row % config.GROUP == 0),
        )
    EXPONENT: gl.constexpr = sum_exponent(config.V_KIND)
    row_max = sums.row_max
    if EXPONENT > 0:
        row_max = row_max - EXPONENT
    final_sum = gl.convert_layout(gl.sum(sums.row_sum, 0), COLUMN) * (2.0 ** (EXPONENT - 14))
    value_scale = factor_without_keys(call.value_scale, final_sum == 0.0, config.V_SCALE_KIND)
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    acc_scale = gl.full([ROWS], 1.0, gl.float32, COLUMN)
    if config.HAS_SINK:
        if num_splits == 1:
            # Otherwise the sink counts when the splits are combined (M4).
            sink = gl.load(call.outputs.sinks + head, mask=valid, other=0.0)
            finite_max, acc_scale, final_sum = add_sink(row_max, final_sum, sink)
    empty = final_sum == 0.0
    safe_sum = gl.where(empty, 1.0, final_sum)
    base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
    acc = scale_parts(sums.acc, acc_scale / safe_sum * (value_scale * (1.0 / UNIT)))
    index = gl.arange(0, WORDS, gl.SliceLayout(1, PRODUCTS))
    if num_splits == 1:
        offsets = call.outputs.offsets(split.start + token, head)
        outputs = acc
        if config.V_SIGNS:
            outputs = _rotated_back(acc, index, call.outputs.pointer.dtype.element_ty, config)
        for part in gl.static_range(PARTS):
            lanes = value_elements(index, part, WORDS, config.V_KIND)
            gl.store(
                call.outputs.pointer + offsets[None, :] + lanes[:, None],
                outputs[part].to(call.outputs.pointer.dtype.element_ty),
                mask=valid[None, :] & (lanes < config.DV)[:, None],
            )
        if config.HAS_LSE:
            call.outputs.store_lses(split.start + token, head, base2, valid)
    else:
        for part in gl.static_range(PARTS):
            lanes = value_elements(index, part, WORDS, config.V_KIND)
            places = partial_index * partials.rows + row
            store_in_l2(
                partials.values + (places * config.DV)[None, :] + lanes[:, None],
                acc[part],
                valid[None, :] & (lanes < config.DV)[:, None],
            )
        gl.store(partials.lses + partial_index * partials.rows + row, base2, mask=valid)
