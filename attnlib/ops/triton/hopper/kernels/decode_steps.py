"""The steps of a split of the Hopper decode: products, softmax and releases of each tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.cache_tiles import clear_tile
from attnlib.ops.triton.hopper.kernels.column_softmax import (
    add_weights,
    mask_columns,
    softmax_columns,
    store_weights,
)
from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    partition_barrier,
)
from attnlib.ops.triton.hopper.kernels.decode_products import (
    finish_scores,
    finish_values,
    multiply_keys,
    multiply_values,
    num_value_products,
    rescale_values,
    score_layout,
    tile_scales,
)
from attnlib.ops.triton.hopper.kernels.decode_worker import release_by_thread
from attnlib.ops.triton.hopper.kernels.prefill_products import hidden_zero, wait_for_tile
from attnlib.ops.triton.hopper.kernels.softmax import (
    apply_function,
    transform_scores,
)
from attnlib.ops.triton.hopper.kernels.token_scales import scales_weights
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = [
    "DecodeRows",
    "DecodeSums",
    "decode_step",
    "first_tile",
    "last_tile",
]


@aggregate
class DecodeRows:
    """The query rows of a split, along the columns of the scores.

    Fields:
        factor: softmax scale in base 2, or what the soft cap needs.
        k_factor: [ROWS], factors of the products over quantized caches; else 0.
        positions, heads: [ROWS], positions and query heads.
        first, last: [ROWS], the keys [first, last) that a row sees.
    """

    factor: Value
    k_factor: Value
    positions: Value
    heads: Value
    first: Value
    last: Value


@aggregate
class DecodeSums:
    """What has been accumulated of the query rows.

    Fields:
        row_max: [ROWS], base-2 maxima.
        acc: [elements of a value, ROWS], or two tensors over 4-bit integers.
        row_sum: sums of weights, [ROWS], or of up to 16 rows [BLOCK_N, ROWS].
    """

    row_max: Value
    acc: Value
    row_sum: Value


@gluon.jit
def _transform(call, scores, rows, tile, request, MASKED: gl.constexpr, SCORE: gl.constexpr):
    """Return the products of a tile after score function, soft cap and mask."""
    config: gl.constexpr = call.config
    KEYS: gl.constexpr = scores.shape[0]
    CHECK_FIRST: gl.constexpr = config.HAS_LEFT or config.HAS_CHUNK
    if SCORE is not None:
        keys = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, scores.type.layout))
        scores = apply_function(
            scores,
            call.scale,
            rows.factor,
            call.soft_cap,
            rows.positions[None, :],
            keys[:, None],
            rows.heads[None, :],
            request,
            call.keys.aux,
            SCORE,
            config.HAS_CAP,
        )
    else:
        scores = transform_scores(scores, rows.factor, call.soft_cap, config.HAS_CAP)
    if MASKED:
        scores = mask_columns(scores, rows.first, rows.last, tile * KEYS, CHECK_FIRST)
    return scores


@gluon.constexpr_function
def _hides_keys(config):
    """Whether the elements of values are multiplied by scales, also of keys that no row sees."""
    return not scales_weights(config.V_KIND) and (config.HAS_LEFT or config.HAS_CHUNK)


@gluon.jit
def _hidden_keys(rows, start, config):
    """Return the keys of a tile, from its first one, `start`, that no row sees."""
    hidden = 0
    if _hides_keys(config):
        hidden = gl.min(rows.first, 0) - start
    return hidden


@gluon.jit
def _release_keys(worker, stage, config):
    """Release a stage of keys after the product with them."""
    if config.WORKERS > 1:
        release_by_thread(worker.keys.empty, stage)  # the keys are in registers
    elif not config.PACKED:
        if config.K_KIND != KV_PLAIN:
            partition_barrier()
        mbarrier.arrive(worker.keys.empty.index(stage), count=1)


@gluon.jit
def first_tile(call, worker, split, rows, row_max, acc, step):
    """Multiply by the keys of the first tile, which has no values of an earlier tile to multiply
    by, and do its softmax. Returns `DecodeSums`."""
    config: gl.constexpr = call.config
    BLOCK_N: gl.constexpr = config.BLOCK_N
    ROWS: gl.constexpr = config.ROWS
    K_KIND: gl.constexpr = config.K_KIND
    LAYOUT: gl.constexpr = score_layout(ROWS)
    tile = split.first()
    stage = step % config.STAGES
    wait_for_tile(worker.keys.full, stage, (step // config.STAGES) & 1, config.GATHERS)
    zeros = gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT)
    scales = tile_scales(worker, stage, LAYOUT)
    scores = multiply_keys(worker, stage, zeros, config.PACKED, K_KIND)
    scores = finish_scores(scores, rows.k_factor, scales.keys, 0, K_KIND)
    _release_keys(worker, stage, call.config)
    scores = _transform(call, scores, rows, tile, split.request, True, call.SCORE)
    weights, _, row_max = softmax_columns(
        scores,
        rows.factor,
        row_max,
        scales.values,
        call.SCORE,
        True,
        config.HAS_CAP,
        worker.columns,
    )
    row_sum = weights
    if ROWS > 16:
        row_sum = gl.sum(weights, 0)
    store_weights(worker.p_tile, weights, scales.values, True, config.V_KIND)
    return DecodeSums(row_max, acc, row_sum)


@gluon.jit
def decode_step(
    call, worker, rows, sums, step, tile, request, MASKED: gl.constexpr, SCORE: gl.constexpr
):
    """Multiply by the keys of `tile` and by the values of the tile before it, then do the softmax.
    Returns `DecodeSums`."""
    config: gl.constexpr = call.config
    BLOCK_N: gl.constexpr = config.BLOCK_N
    ROWS: gl.constexpr = config.ROWS
    STAGES: gl.constexpr = config.STAGES
    K_KIND: gl.constexpr = config.K_KIND
    V_KIND: gl.constexpr = config.V_KIND
    LAYOUT: gl.constexpr = score_layout(ROWS)
    keys = worker.keys
    values = worker.values
    stage = step % STAGES
    v_stage = (step - 1) % STAGES
    if STAGES == 1:
        stage = hidden_zero(step)
        v_stage = stage
    zeros = gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT)
    # Wait for the loads of this tile's keys, then issue K @ Q^T.
    wait_for_tile(keys.full, stage, (step // STAGES) & 1, config.GATHERS)
    scales = tile_scales(worker, stage, LAYOUT)
    scores = multiply_keys(worker, stage, zeros, config.PACKED, K_KIND)
    # Wait for the loads of the previous tile's values, then issue V^T @ P^T behind it.
    wait_for_tile(values.full, v_stage, ((step - 1) // STAGES) & 1, config.GATHERS)
    hidden = _hidden_keys(rows, (tile - 1) * BLOCK_N, config)
    HIDES: gl.constexpr = _hides_keys(config)
    acc = multiply_values(worker, v_stage, sums.acc, hidden, BLOCK_N, config.PACKED, HIDES, V_KIND)
    if K_KIND != KV_PLAIN:
        # Both tiles are in registers.
        if config.WORKERS > 1:
            release_by_thread(keys.empty, stage)
            release_by_thread(values.empty, v_stage)
        else:
            partition_barrier()
            mbarrier.arrive(keys.empty.index(stage), count=1)
            mbarrier.arrive(values.empty.index(v_stage), count=1)
    # One group may stay in flight: K @ Q^T is complete, V^T @ P^T overlaps with the softmax.
    LATER: gl.constexpr = num_value_products(V_KIND)
    scores = finish_scores(scores, rows.k_factor, scales.keys, LATER, K_KIND)
    if (K_KIND == KV_PLAIN) and (not config.PACKED):
        mbarrier.arrive(keys.empty.index(stage), count=1)
    scores = _transform(call, scores, rows, tile, request, MASKED, SCORE)
    weights, acc_scale, row_max = softmax_columns(
        scores,
        rows.factor,
        sums.row_max,
        scales.values,
        SCORE,
        MASKED,
        config.HAS_CAP,
        worker.columns,
    )
    row_sum = add_weights(sums.row_sum, acc_scale, weights)
    # V^T @ P^T is complete: its stage and p_tile are free, and the accumulator may be rescaled.
    acc = finish_values(acc, V_KIND)
    if V_KIND == KV_PLAIN:
        mbarrier.arrive(values.empty.index(v_stage), count=1)
    acc = rescale_values(acc, acc_scale, ROWS, V_KIND)
    store_weights(worker.p_tile, weights, scales.values, MASKED, V_KIND)
    return DecodeSums(row_max, acc, row_sum)


@gluon.jit
def last_tile(call, worker, split, rows, acc, step):
    """Return the accumulator after the product with the values of the last tile, which is that of
    the step before `step`."""
    config: gl.constexpr = call.config
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    V_KIND: gl.constexpr = config.V_KIND
    values = worker.values
    stage = (step - 1) % STAGES
    wait_for_tile(values.full, stage, ((step - 1) // STAGES) & 1, config.GATHERS)
    start = (split.first() + split.count - 1) * BLOCK_N
    past_end = split.seq_len - start
    hidden = _hidden_keys(rows, start, config)
    # TMA fills whole pages past the end with zeros, but not the rest of the last page.
    if V_KIND == KV_PLAIN:
        if (past_end < BLOCK_N) & (split.seq_len % config.BLOCK_SIZE != 0):
            clear_tile(values.memory.index(stage), past_end, 1 if config.PACKED else 0)
    acc = multiply_values(worker, stage, acc, hidden, past_end, config.PACKED, True, V_KIND)
    acc = finish_values(acc, V_KIND)
    if config.WORKERS > 1:
        release_by_thread(values.empty, stage)  # the values are in registers
        if config.QUERY_WARP:
            # Products with the queries are complete.
            worker.release_queries()
    else:
        if V_KIND != KV_PLAIN:
            partition_barrier()
        mbarrier.arrive(values.empty.index(stage), count=1)
    return acc
