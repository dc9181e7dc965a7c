"""How a consumer warpgroup attends to a split of a request over latents in quarters of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.cache_tiles import clear_tile
from attnlib.ops.triton.hopper.kernels.column_softmax import (
    column_sum,
    load_columns,
    mask_columns,
    softmax_columns,
    sum_of_warps,
)
from attnlib.ops.triton.hopper.kernels.compat import partition_barrier, store_in_l2
from attnlib.ops.triton.hopper.kernels.decode_products import score_layout, value_lanes
from attnlib.ops.triton.hopper.kernels.kv_scales import factor_without_keys
from attnlib.ops.triton.hopper.kernels.latent_bytes import HALVES
from attnlib.ops.triton.hopper.kernels.latent_columns import LATENTS
from attnlib.ops.triton.hopper.kernels.latent_group_scales import largest_scale
from attnlib.ops.triton.hopper.kernels.latent_rows import normalizers
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_memory import QUARTERS
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_scores import score_tile
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_values import (
    add_values,
    clear_latents,
    share_weights,
)
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["attend_to_split", "store_split"]


@gluon.jit
def _clear_past_end(stages, past_end, CONFIG: gl.constexpr):
    """Clear the latents of a tile that are past the end of the sequence."""
    for quarter in gl.static_range(QUARTERS):
        if CONFIG.KV_KIND == KV_PLAIN:
            clear_tile(stages[quarter].tile(), past_end, 0)
        else:
            clear_latents(stages[quarter].tile(), past_end)
    if CONFIG.KV_KIND != KV_PLAIN:
        # TMA overwrites what was cleared.
        fence_async_shared()
        partition_barrier()


@gluon.constexpr_function
def _pairs(rows):
    """Return the shape of weights [LATENTS, rows] by warp, number of the two latents of a thread,
    thread and row."""
    return [LATENTS.value // 16, 2, 8, rows]


@gluon.jit
def _no_sums(LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Return the sums of no weights: of each latent of a tile, or of two where more rows leave few
    registers. They are added up at the end."""
    ROWS: gl.constexpr = CONFIG.ROWS
    sums = gl.zeros([LATENTS, ROWS], gl.float32, LAYOUT)
    if ROWS > 16:
        sums = gl.sum(gl.reshape(sums, _pairs(ROWS)), 1)
    return sums


@gluon.jit
def _add_sums(sums, acc_scale, weights):
    """Return the sums after another tile."""
    ROWS: gl.constexpr = weights.shape[1]
    if ROWS > 16:
        both = gl.sum(gl.reshape(weights, _pairs(ROWS)), 1)
        factor = gl.convert_layout(
            acc_scale, gl.SliceLayout(0, gl.SliceLayout(1, both.type.layout))
        )
        return sums * factor[None, None, :] + both
    else:
        return sums * acc_scale[None, :] + weights


@gluon.jit
def _total(sums, memory, LAYOUT: gl.constexpr):
    """Return the sums of the rows."""
    ROWS: gl.constexpr = sums.shape[-1]
    if ROWS > 16:
        return sum_of_warps(gl.sum(sums, 1), memory.columns, LAYOUT)
    else:
        return column_sum(sums, memory.columns)


@gluon.jit
def attend_to_split(split, rows, mask, memory, logits, step, CONFIG: gl.constexpr):
    """Attend to all tiles of a split.

    Args:
        step: number of tiles before the split.

    Returns:
        (accumulators of the quarters, or of their halves over an 8-bit cache, maxima, sums of the
        weights, number of tiles so far).
    """
    ROWS: gl.constexpr = CONFIG.ROWS
    LAYOUT: gl.constexpr = score_layout(ROWS)
    IS_PLAIN: gl.constexpr = CONFIG.KV_KIND == KV_PLAIN
    PARTS: gl.constexpr = QUARTERS if IS_PLAIN else QUARTERS * HALVES
    WIDTH: gl.constexpr = CONFIG.DV // PARTS
    CHECK_FIRST: gl.constexpr = mask.HAS_LEFT or mask.HAS_CHUNK
    seq_len = split.seq_len
    if IS_PLAIN:
        row_first, row_last = mask.span(rows.token + (seq_len - split.query_len), seq_len)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    sums = _no_sums(LAYOUT, CONFIG)
    acc = ()
    for _part in gl.static_range(PARTS):
        acc = acc + (gl.zeros([WIDTH, ROWS], gl.float32, LAYOUT),)
    first = split.first()
    for i in range(0, split.count):
        tile = first + i
        number = step * QUARTERS
        stages = ()
        for quarter in gl.static_range(QUARTERS):
            stages = stages + (memory.quarters.at(number + quarter),)
        scores = score_tile(memory, stages, step, LAYOUT, CONFIG)
        if not IS_PLAIN:
            # Loaded for each tile: few registers are left.
            scores = scores * load_columns(memory.factors, LAYOUT)[None, :]
        # TMA fills whole pages past the end with zeros, but not the rest of the last page, which
        # may hold anything (P5). Warps that convert latents load none past the end.
        past_end = seq_len - tile * LATENTS
        if not CONFIG.CONVERTS:
            if (past_end < LATENTS) & (seq_len % CONFIG.BLOCK_SIZE != 0):
                _clear_past_end(stages, past_end, CONFIG)
        scores = logits.transform(scores)
        if (tile >= split.visited.right_begin) | (tile < split.visited.left_end):
            if not IS_PLAIN:
                row_first, row_last = mask.span(rows.token + (seq_len - split.query_len), seq_len)
            scores = mask_columns(scores, row_first, row_last, tile * LATENTS, CHECK_FIRST)
        units = None
        if CONFIG.GROUP_SCALES:
            units = largest_scale(memory, step, LAYOUT)
        weights, acc_scale, row_max = softmax_columns(
            scores, logits.factor, row_max, units, None, True, logits.HAS_CAP, memory.columns
        )
        sums = _add_sums(sums, acc_scale, weights)
        scaled = ()
        for part in gl.static_range(PARTS):
            scaled = scaled + (acc[part] * acc_scale[None, :],)
        share_weights(memory, weights, step, CONFIG)
        if not IS_PLAIN:
            # All warps have used these elements and their scales.
            memory.rotary.release(step % CONFIG.ROTARY_STAGES)
        acc = add_values(scaled, stages, memory, CONFIG)
        step += 1
    return acc, row_max, _total(sums, memory, LAYOUT), step


@gluon.jit
def store_split(acc, row_max, row_sum, rows, split, place, outputs, partials, value_scale):
    """Write the results of a split: the output of a single one, else a partial result.

    Args:
        acc: accumulators of parts of the elements, [elements, rows].
        value_scale: factor of the values over an 8-bit cache.
    """
    config: gl.constexpr = rows.config
    WIDTH: gl.constexpr = acc[0].shape[0]
    LAYOUT: gl.constexpr = acc[0].type.layout
    valid = rows.exist(split.query_len)
    if split.skipped == 0:
        header = rows.header(place)
        if config.HEAD_BLOCKS > 1 or config.MANY_TOKENS:
            mask = valid & (rows.row % config.GROUP == 0)
            first = partials.headers + split.kv_head % config.HEAD_BLOCKS
            gl.store(first + (split.start + rows.token) * config.HEAD_BLOCKS, header, mask=mask)
        else:
            mask = valid & (rows.head == 0)
            gl.store(partials.headers + split.start + rows.token, header, mask=mask)
    SCALED: gl.constexpr = config.CONVERTS or config.KV_KIND != KV_PLAIN
    if SCALED:
        value_scale = factor_without_keys(value_scale, row_sum == 0.0, config.V_SCALE_KIND)
    normalizer = normalizers(
        row_max, row_sum, rows, valid, split, place, outputs, partials, STORE=True
    )
    if SCALED:
        normalizer = normalizer * value_scale
    normalizer = normalizer[None, :]
    offsets = outputs.offsets(split.start + rows.token, rows.head)
    partial_offsets = rows.partial_offsets(partials, place)
    for part in gl.static_range(config.DV // WIDTH):
        result = acc[part] * normalizer
        lanes = part * WIDTH + value_lanes(WIDTH, LAYOUT, config.KV_KIND)
        mask = valid[None, :] & (lanes >= 0)[:, None]
        if place.num_splits == 1:
            pointers = outputs.pointer + offsets[None, :] + lanes[:, None]
            gl.store(pointers, result.to(outputs.pointer.dtype.element_ty), mask=mask)
        else:
            # The latents that stream through the L2 cache would evict them before they are
            # combined.
            values = partials.values + partial_offsets[None, :] + lanes[:, None]
            store_in_l2(values, result, mask)
