"""How four warps attend to a split of a request with up to 16 query rows over latents."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from attnlib.ops.triton.hopper.kernels.cache_tiles import clear_tile
from attnlib.ops.triton.hopper.kernels.column_softmax import (
    mask_columns,
    softmax_columns,
    store_weights,
)
from attnlib.ops.triton.hopper.kernels.compat import opaque_zero, partition_barrier, store_in_l2
from attnlib.ops.triton.hopper.kernels.latent_columns import (
    COLUMNS,
    LATENTS,
    multiply_keys,
    multiply_values,
)
from attnlib.ops.triton.hopper.kernels.latent_rows import (
    copy_queries,
    normalizers,
    query_offsets,
    query_rows,
)
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_memory import QUARTERS, ROTARY_STAGES
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["attend_to_split", "copy_split_queries", "store_split"]


@gluon.jit
def copy_split_queries(queries, row, split, memory, CONFIG: gl.constexpr):
    """Copy the queries of a split to shared memory.

    Args:
        row: [rows], numbers of the query rows.
    """
    WIDTH: gl.constexpr = CONFIG.DV // QUARTERS
    # All warps are done with the tiles and queries of the split before.
    partition_barrier()
    rows = query_rows(row, 0, CONFIG)
    offsets = query_offsets(queries, rows, split.start)
    valid = rows.exist(split.query_len)
    for quarter in gl.static_range(QUARTERS):
        copy_queries(memory.queries.index(quarter), queries, offsets, valid, quarter * WIDTH)
    copy_queries(memory.query_rotary.index(0), queries, offsets, valid, CONFIG.DV)
    # WGMMA reads shared memory through the async proxy: fence, then wait for all warps.
    fence_async_shared()
    partition_barrier()


@gluon.jit
def _multiply_quarter(scores, stage, queries, QUARTER: gl.constexpr):
    """Issue the product with a quarter of the elements once it is loaded."""
    stage.wait_full()
    return multiply_keys(scores, stage.tile(), queries.index(QUARTER), QUARTER > 0)


@gluon.jit
def _multiply_keys(memory, stages, step):
    """Return the scores of a tile, [latents, rows].

    Args:
        stages: of the quarters of the tile.
        step: number of the tile. The stage of its other elements becomes free.
    """
    ROWS: gl.constexpr = memory.queries.shape[1]
    scores = gl.zeros([LATENTS, ROWS], gl.float32, COLUMNS)
    scores = _multiply_quarter(scores, stages[0], memory.queries, 0)
    stage = step % ROTARY_STAGES
    memory.rotary.wait_full(stage, step)
    queries = memory.query_rotary.index(opaque_zero())
    scores = multiply_keys(scores, memory.rotary.memory.index(stage), queries, True)
    for quarter in gl.static_range(1, QUARTERS):
        scores = _multiply_quarter(scores, stages[quarter], memory.queries, quarter)
    scores = warpgroup_mma_wait(0, deps=[scores])
    memory.rotary.release(stage)
    return scores


@gluon.jit
def _multiply_values(acc, stages, weights):
    """Add the products of the weights with a tile and release its quarters.

    Args:
        acc: accumulators of the quarters.
        stages: of the quarters of the tile.
    """
    issued = ()
    for quarter in gl.static_range(QUARTERS):
        issued = issued + (multiply_values(acc[quarter], stages[quarter].tile(), weights),)
    complete = ()
    for quarter in gl.static_range(QUARTERS):
        result = warpgroup_mma_wait(QUARTERS - 1 - quarter, deps=[issued[quarter]])
        stages[quarter].release()
        complete = complete + (result,)
    return complete


@gluon.jit
def attend_to_split(split, rows, mask, memory, logits, step, CONFIG: gl.constexpr):
    """Attend to all tiles of a split.

    Args:
        step: number of tiles before the split.

    Returns:
        (accumulators of the quarters, maxima, sums of the weights, number of tiles so far).
    """
    ROWS: gl.constexpr = CONFIG.ROWS
    WIDTH: gl.constexpr = CONFIG.DV // QUARTERS
    CHECK_FIRST: gl.constexpr = mask.HAS_LEFT or mask.HAS_CHUNK
    seq_len = split.seq_len
    row_first, row_last = mask.span(rows.token + (seq_len - split.query_len), seq_len)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, COLUMNS))
    # Sums of the weights of each latent of a tile; added up at the end.
    sums = gl.zeros([LATENTS, ROWS], gl.float32, COLUMNS)
    acc = ()
    for _quarter in gl.static_range(QUARTERS):
        acc = acc + (gl.zeros([WIDTH, ROWS], gl.float32, COLUMNS),)
    first = split.first()
    for i in range(0, split.count):
        tile = first + i
        number = step * QUARTERS
        stages = ()
        for quarter in gl.static_range(QUARTERS):
            stages = stages + (memory.quarters.at(number + quarter),)
        scores = _multiply_keys(memory, stages, step)
        # TMA fills whole pages past the end with zeros, but not the rest of the last page, which
        # may hold anything (P5).
        past_end = seq_len - tile * LATENTS
        if (past_end < LATENTS) & (seq_len % CONFIG.BLOCK_SIZE != 0):
            for quarter in gl.static_range(QUARTERS):
                clear_tile(stages[quarter].tile(), past_end, 0)
        scores = logits.transform(scores)
        if (tile >= split.visited.right_begin) | (tile < split.visited.left_end):
            scores = mask_columns(scores, row_first, row_last, tile * LATENTS, CHECK_FIRST)
        weights, acc_scale, row_max = softmax_columns(
            scores, logits.factor, row_max, None, None, True, logits.HAS_CAP
        )
        sums = sums * acc_scale[None, :] + weights
        scaled = ()
        for quarter in gl.static_range(QUARTERS):
            scaled = scaled + (acc[quarter] * acc_scale[None, :],)
        store_weights(memory.weights.index(0), weights, None, True, KV_PLAIN)
        acc = _multiply_values(scaled, stages, memory.weights.index(opaque_zero()))
        step += 1
    return acc, row_max, gl.sum(sums, 0), step


@gluon.jit
def store_split(acc, row_max, row_sum, rows, split, place, outputs, partials):
    """Write the results of a split: the output of a single one, else a partial result.

    Args:
        acc: accumulators of the quarters, [elements, rows].
    """
    WIDTH: gl.constexpr = acc[0].shape[0]
    valid = rows.exist(split.query_len)
    if split.skipped == 0:
        header = rows.header(place)
        mask = valid & (rows.head == 0)
        gl.store(partials.headers + split.start + rows.token, header, mask=mask)
    normalizer = normalizers(
        row_max, row_sum, rows, valid, split, place, outputs, partials, STORE=True
    )[None, :]
    offsets = outputs.offsets(split.start + rows.token, rows.head)
    partial_offsets = rows.partial_offsets(partials, place)
    for quarter in gl.static_range(QUARTERS):
        result = acc[quarter] * normalizer
        lanes = quarter * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, COLUMNS))
        mask = valid[None, :] & (lanes >= 0)[:, None]
        if place.num_splits == 1:
            pointers = outputs.pointer + offsets[None, :] + lanes[:, None]
            gl.store(pointers, result.to(outputs.pointer.dtype.element_ty), mask=mask)
        else:
            # The latents that stream through the L2 cache would evict them before they are
            # combined.
            values = partials.values + partial_offsets[None, :] + lanes[:, None]
            store_in_l2(values, result, mask)
