"""The consumer of the Hopper decode: prologue, main loop and epilogue of each split."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.column_softmax import (
    load_columns,
)
from attnlib.ops.triton.hopper.kernels.combine import clear_rows
from attnlib.ops.triton.hopper.kernels.compat import (
    launch_dependent_grids,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode_call import Split
from attnlib.ops.triton.hopper.kernels.decode_loader import worker_share
from attnlib.ops.triton.hopper.kernels.decode_output import finish_split
from attnlib.ops.triton.hopper.kernels.decode_products import (
    score_layout,
    zero_values,
)
from attnlib.ops.triton.hopper.kernels.decode_queries import prefetch_queries, prepare_queries
from attnlib.ops.triton.hopper.kernels.decode_steps import (
    DecodeRows,
    DecodeSums,
    decode_step,
    first_tile,
    last_tile,
)
from attnlib.ops.triton.hopper.kernels.kv_scales import load_kv_scale
from attnlib.ops.triton.hopper.kernels.quantized import value_unit
from attnlib.ops.triton.hopper.kernels.softmax import (
    score_factor,
)
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = [
    "consumer",
]


@gluon.jit
def _begin_split(call, worker, split, number, factor, key_scale, share, position):
    """Bring the queries of a split to shared memory, and return its `DecodeRows`.

    Args:
        number: number of splits before this one.
        factor: softmax scale in base 2, or what the soft cap needs.
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
    if config.K_KIND != KV_PLAIN:
        k_factor = load_columns(worker.factors, LAYOUT)
    if not config.QUERY_WARP:
        if position + split.count < share.range.end:
            next_token = split.start + split.query_len
            prefetch_queries(call.queries, next_token, split.kv_head, GROUP, config.D, ROWS)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    positions = row // GROUP + (split.seq_len - split.query_len)
    heads = split.kv_head * GROUP + row % GROUP
    first, last = call.keys.mask.span(positions, split.seq_len)
    return DecodeRows(factor, k_factor, positions, heads, first, last)


@gluon.jit
def _compute_split(call, worker, split, rows, step):
    """Return the `DecodeSums` of a split whose queries are in shared memory."""
    config: gl.constexpr = call.config
    ROWS: gl.constexpr = config.ROWS
    COLUMN: gl.constexpr = gl.SliceLayout(0, score_layout(ROWS))
    # With bounds, unmasked tiles have scores that the function does not change.
    FULL_SCORE: gl.constexpr = None if call.keys.BOUNDS is not None else call.SCORE
    row_max = gl.full([ROWS], float("-inf"), gl.float32, COLUMN)
    acc = zero_values(ROWS, config.WIDTH_V, config.V_KIND)
    sums = first_tile(call, worker, split, rows, row_max, acc, step)
    # Only tiles at the ends of the visible keys need a mask.
    for i in range(1, split.count):
        tile = split.first() + i
        if split.visited.needs_mask(tile):
            sums = decode_step(
                call, worker, rows, sums, step + i, tile, split.request, True, call.SCORE
            )
        else:
            sums = decode_step(
                call, worker, rows, sums, step + i, tile, split.request, False, FULL_SCORE
            )
    acc = last_tile(call, worker, split, rows, sums.acc, step + split.count)
    return DecodeSums(sums.row_max, acc, sums.row_sum)


@gluon.jit
def consumer(call, worker, share):
    """Multiply, and write or combine the results of a worker's splits. One warpgroup.

    Args:
        call: `DecodeCall`.
        worker: `Worker`.
        share: its `WorkerShare`; None for the only worker of a CTA, whose warps find it.
    """
    config: gl.constexpr = call.config
    keys = call.keys
    factor = score_factor(call.scale, call.soft_cap, config.HAS_CAP)
    if call.early == 0:
        # PDL: the previous kernel may have written the queries, the cache or the lengths.
        wait_on_dependent_grids()
    if share is None:
        share = worker_share(keys, 0, call.config)
    wait_on_dependent_grids()
    if not config.COMBINE_IN_KERNEL:
        # The combine kernel may start; it waits for this kernel's results by itself.
        launch_dependent_grids()
    key_scale = 0.0
    value_scale = 0.0
    if config.K_KIND != KV_PLAIN:
        key_scale = load_kv_scale(call.k_scale, share.kv_head, config.K_SCALE_KIND)
        value_scale = load_kv_scale(call.v_scale, share.kv_head, config.V_SCALE_KIND)
        value_scale = value_scale / value_unit(config.V_KIND)
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
            call.outputs,
            keys.batch,
            call.queries.num_tokens,
            share.worker,
            share.num_workers,
            call.config,
        )
        launch_dependent_grids()
