"""The consumer of the Hopper decode: prologue, main loop and epilogue of each split."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.cache_tiles import clear_tile
from attnlib.ops.triton.hopper.kernels.column_softmax import (
    add_weights,
    load_columns,
    mask_columns,
    softmax_columns,
    store_weights,
)
from attnlib.ops.triton.hopper.kernels.combine import clear_rows
from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    launch_dependent_grids,
    partition_barrier,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import Split
from attnlib.ops.triton.hopper.kernels.decode_loader import worker_share
from attnlib.ops.triton.hopper.kernels.decode_output import finish_split
from attnlib.ops.triton.hopper.kernels.decode_products import (
    finish_scores,
    finish_values,
    multiply_keys,
    multiply_values,
    rescale_values,
    score_layout,
    tile_scales,
    zero_values,
)
from attnlib.ops.triton.hopper.kernels.decode_queries import prefetch_queries, prepare_queries
from attnlib.ops.triton.hopper.kernels.decode_worker import release_by_thread
from attnlib.ops.triton.hopper.kernels.mainloop import hidden_zero, wait_for_tile
from attnlib.ops.triton.hopper.kernels.quantized import WEIGHT_SCALE, load_kv_scale
from attnlib.ops.triton.hopper.kernels.softmax import (
    apply_function,
    score_factor,
    transform_scores,
)
from attnlib.ops.triton.kernels.quant import KV_INT4, KV_PLAIN

__all__ = ["consumer"]


@aggregate
class _Rows:
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
class _Sums:
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
            scores, call.scale, rows.factor, call.soft_cap, rows.positions[None, :], keys[:, None],
            rows.heads[None, :], request, call.keys.aux, SCORE, config.HAS_CAP,
        )  # fmt: skip
    else:
        scores = transform_scores(scores, rows.factor, call.soft_cap, config.HAS_CAP)
    if MASKED:
        scores = mask_columns(scores, rows.first, rows.last, tile * KEYS, CHECK_FIRST)
    return scores


@gluon.jit
def _release_keys(worker, stage, config):
    """Release a stage of keys after the product with them."""
    if config.WORKERS > 1:
        release_by_thread(worker.keys.empty, stage)  # the keys are in registers
    elif not config.PACKED:
        if config.KV_KIND != KV_PLAIN:
            partition_barrier()
        mbarrier.arrive(worker.keys.empty.index(stage), count=1)


@gluon.jit
def _first_tile(call, worker, split, rows, row_max, acc, step):
    """Multiply by the keys of the first tile, which has no values of an earlier tile to multiply
    by, and do its softmax. Returns `_Sums`."""
    config: gl.constexpr = call.config
    BLOCK_N: gl.constexpr = config.BLOCK_N
    ROWS: gl.constexpr = config.ROWS
    KV_KIND: gl.constexpr = config.KV_KIND
    LAYOUT: gl.constexpr = score_layout(ROWS)
    tile = split.first()
    stage = step % config.STAGES
    wait_for_tile(worker.keys.full, stage, (step // config.STAGES) & 1, config.GATHERS)
    zeros = gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT)
    scales = tile_scales(worker, stage, LAYOUT)
    scores = multiply_keys(worker, stage, zeros, config.PACKED, KV_KIND)
    scores = finish_scores(scores, rows.k_factor, scales.keys, 0, KV_KIND)
    _release_keys(worker, stage, call.config)
    scores = _transform(call, scores, rows, tile, split.request, True, call.SCORE)
    weights, _, row_max = softmax_columns(
        scores, rows.factor, row_max, scales.values, call.SCORE, True, config.HAS_CAP,
        worker.columns,
    )  # fmt: skip
    row_sum = weights
    if ROWS > 16:
        row_sum = gl.sum(weights, 0)
    store_weights(worker.p_tile, weights, scales.values, True, KV_KIND)
    return _Sums(row_max, acc, row_sum)


@gluon.jit
def _step(call, worker, rows, sums, step, tile, request, MASKED: gl.constexpr, SCORE: gl.constexpr):
    """Multiply by the keys of `tile` and by the values of the tile before it, then do the softmax.
    Returns `_Sums`."""
    config: gl.constexpr = call.config
    BLOCK_N: gl.constexpr = config.BLOCK_N
    ROWS: gl.constexpr = config.ROWS
    STAGES: gl.constexpr = config.STAGES
    KV_KIND: gl.constexpr = config.KV_KIND
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
    scores = multiply_keys(worker, stage, zeros, config.PACKED, KV_KIND)
    # Wait for the loads of the previous tile's values, then issue V^T @ P^T behind it.
    wait_for_tile(values.full, v_stage, ((step - 1) // STAGES) & 1, config.GATHERS)
    acc = multiply_values(worker, v_stage, sums.acc, 0, config.PACKED, False, KV_KIND)
    if KV_KIND != KV_PLAIN:
        # Both tiles are in registers.
        if config.WORKERS > 1:
            release_by_thread(keys.empty, stage)
            release_by_thread(values.empty, v_stage)
        else:
            partition_barrier()
            mbarrier.arrive(keys.empty.index(stage), count=1)
            mbarrier.arrive(values.empty.index(v_stage), count=1)
    # One group may stay in flight: K @ Q^T is complete, V^T @ P^T overlaps with the softmax.
    LATER: gl.constexpr = 2 if KV_KIND == KV_INT4 else 1
    scores = finish_scores(scores, rows.k_factor, scales.keys, LATER, KV_KIND)
    if (KV_KIND == KV_PLAIN) and (not config.PACKED):
        mbarrier.arrive(keys.empty.index(stage), count=1)
    scores = _transform(call, scores, rows, tile, request, MASKED, SCORE)
    weights, acc_scale, row_max = softmax_columns(
        scores, rows.factor, sums.row_max, scales.values, SCORE, MASKED, config.HAS_CAP,
        worker.columns,
    )  # fmt: skip
    row_sum = add_weights(sums.row_sum, acc_scale, weights)
    # V^T @ P^T is complete: its stage and p_tile are free, and the accumulator may be rescaled.
    acc = finish_values(acc, KV_KIND)
    if KV_KIND == KV_PLAIN:
        mbarrier.arrive(values.empty.index(v_stage), count=1)
    acc = rescale_values(acc, acc_scale, ROWS, KV_KIND)
    store_weights(worker.p_tile, weights, scales.values, MASKED, KV_KIND)
    return _Sums(row_max, acc, row_sum)


@gluon.jit
def _last_values(call, worker, split, acc, step):
    """Return the accumulator after the product with the values of the last tile, which is that of
    the step before `step`."""
    config: gl.constexpr = call.config
    BLOCK_N: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    KV_KIND: gl.constexpr = config.KV_KIND
    values = worker.values
    stage = (step - 1) % STAGES
    wait_for_tile(values.full, stage, ((step - 1) // STAGES) & 1, config.GATHERS)
    past_end = split.seq_len - (split.first() + split.count - 1) * BLOCK_N
    # TMA fills whole pages past the end with zeros, but not the rest of the last page.
    if KV_KIND == KV_PLAIN:
        if (past_end < BLOCK_N) & (split.seq_len % config.BLOCK_SIZE != 0):
            clear_tile(values.memory.index(stage), past_end, 1 if config.PACKED else 0)
    acc = multiply_values(worker, stage, acc, past_end, config.PACKED, True, KV_KIND)
    acc = finish_values(acc, KV_KIND)
    if config.WORKERS > 1:
        release_by_thread(values.empty, stage)  # the values are in registers
        if config.QUERY_WARP:
            # Products with the queries are complete.
            release_by_thread(worker.query_barriers, 1)
    else:
        if KV_KIND != KV_PLAIN:
            partition_barrier()
        mbarrier.arrive(values.empty.index(stage), count=1)
    return acc


@gluon.jit
def _begin_split(call, worker, split, number, factor, key_scale, share, position):
    """Bring the queries of a split to shared memory, and return its `_Rows`.

    Args:
        number: number of splits before this one.
        factor: as in `_Rows`.
        key_scale: scale of the keys of this head; over quantized caches.
        share: `WorkerShare`, in whose range the split is at `position` of the line.
    """
    config: gl.constexpr = call.config
    ROWS: gl.constexpr = config.ROWS
    GROUP: gl.constexpr = config.GROUP
    LAYOUT: gl.constexpr = score_layout(ROWS)
    if config.QUERY_WARP:
        worker.wait_for_queries(number)
    else:
        prepare_queries(call, worker, split, key_scale)
    k_factor = 0.0
    if config.KV_KIND != KV_PLAIN:
        k_factor = load_columns(worker.factors, LAYOUT)
    if not config.QUERY_WARP:
        if position + split.count < share.range.end:
            next_token = split.start + split.query_len
            prefetch_queries(call.queries, next_token, split.kv_head, GROUP, config.D, ROWS)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    positions = row // GROUP + (split.seq_len - split.query_len)
    heads = split.kv_head * GROUP + row % GROUP
    first, last = call.keys.mask.span(positions, split.seq_len)
    return _Rows(factor, k_factor, positions, heads, first, last)


@gluon.jit
def _compute_split(call, worker, split, rows, step):
    """Return the `_Sums` of a split whose queries are in shared memory."""
    config: gl.constexpr = call.config
    ROWS: gl.constexpr = config.ROWS
    COLUMN: gl.constexpr = gl.SliceLayout(0, score_layout(ROWS))
    # With bounds, unmasked tiles have scores that the function does not change.
    FULL_SCORE: gl.constexpr = None if call.keys.BOUNDS is not None else call.SCORE
    row_max = gl.full([ROWS], float("-inf"), gl.float32, COLUMN)
    acc = zero_values(ROWS, config.WIDTH_V, config.KV_KIND)
    sums = _first_tile(call, worker, split, rows, row_max, acc, step)
    # Only tiles at the ends of the visible keys need a mask.
    for i in range(1, split.count):
        tile = split.first() + i
        if split.visited.needs_mask(tile):
            sums = _step(call, worker, rows, sums, step + i, tile, split.request, True, call.SCORE)
        else:
            sums = _step(call, worker, rows, sums, step + i, tile, split.request, False, FULL_SCORE)
    acc = _last_values(call, worker, split, sums.acc, step + split.count)
    return _Sums(sums.row_max, acc, sums.row_sum)


@gluon.jit
def consumer(call, worker, WORKER: gl.constexpr):
    """Multiply, and write or combine the results of a worker's splits. One warpgroup.

    Args:
        call: `DecodeCall`.
        worker: `Worker`, number WORKER of the CTA.
    """
    config: gl.constexpr = call.config
    keys = call.keys
    factor = score_factor(call.scale, call.soft_cap, config.HAS_CAP)
    # PDL: the previous kernel may have written the queries, the cache or the lengths.
    wait_on_dependent_grids()
    if not config.COMBINE_IN_KERNEL:
        # The combine kernel may start; it waits for this kernel's results by itself.
        launch_dependent_grids()
    share = worker_share(keys, WORKER, call.config)
    key_scale = 0.0
    value_scale = 0.0
    if config.KV_KIND != KV_PLAIN:
        key_scale = load_kv_scale(call.k_scale, share.kv_head, config.K_SCALE_KIND)
        value_scale = load_kv_scale(call.v_scale, share.kv_head, config.V_SCALE_KIND) / WEIGHT_SCALE
    position = share.range.begin
    request = share.range.request
    before = share.range.before
    step = 0
    number = 0
    while position < share.range.end:
        tiles = keys.count(request, True)
        request_end = before + tiles
        if position < request_end:
            skipped = position - before
            count = gl.minimum(tiles - skipped, share.range.end - position)
            start, query_len, seq_len = keys.batch.lengths(request, True)
            visited = keys.visited(0, query_len, seq_len, request)
            split = Split(
                request, start, query_len, seq_len, share.kv_head, skipped, count, visited
            )
            rows = _begin_split(call, worker, split, number, factor, key_scale, share, position)
            sums = _compute_split(call, worker, split, rows, step)
            step += count
            if config.QUERY_WARP:
                number += 1
            finish_split(call, worker, share, split, sums, value_scale, position, before, tiles)
            position += count
        if position >= request_end:
            before = request_end + gl.where(tiles > 0, share.gap, 0)
            position = gl.maximum(position, before)
            request += 1
    if config.COMBINE_IN_KERNEL:
        # Without a combine kernel, the rows after the last request are cleared here.
        clear_rows(
            call.outputs, keys.batch, call.queries.num_tokens, share.worker, share.num_workers,
            call.config,
        )  # fmt: skip
        launch_dependent_grids()
