"""The key tiles of a work tile: prologue, main loop and last product of a consumer warpgroup."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from attnlib.ops.triton.hopper.kernels.mainloop import key_product, overlapped_step, value_product
from attnlib.ops.triton.hopper.kernels.prefill_products import pack_weights, wait_for_tile
from attnlib.ops.triton.hopper.kernels.prefill_rows import clear_values
from attnlib.ops.triton.hopper.kernels.sign_softmax import lane_references, row_references
from attnlib.ops.triton.hopper.kernels.softmax import LOG2E
from attnlib.ops.triton.hopper.kernels.tile_weights import weigh_tile
from attnlib.ops.triton.hopper.kernels.two_accumulators import (
    LOADED_PARTS,
    SPARE_PARTS,
    wait_for_both,
)
from attnlib.ops.triton.hopper.kernels.value_columns import PART_KEYS, clear_value_parts
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["first_tile", "last_values", "main_loop"]


@gluon.jit
def first_tile(
    call,
    scoring,
    warpgroup,
    rows,
    storage,
    work,
    tiles,
    step,
    row_max,
    row_sum,
    acc,
    sink,
):
    """Weigh the last tile, the first one visited, which has no values of an earlier one to multiply
    by; clear its values past the end of the request.

    Returns:
        (row_max, row_sum, acc, packed weights).
    """
    COPIED: gl.constexpr = call.config.GATHERS
    KEY_PARTS: gl.constexpr = call.config.KEY_PARTS
    keys = storage.keys
    values = storage.values
    stage = step % keys.STAGES
    parity = (step // keys.STAGES) & 1
    # Wait for the TMA loads of the last tile's keys.
    wait_for_tile(keys.full, stage, parity, COPIED)
    if call.config.SPLIT_V:
        operand = rows.tile
    else:
        operand = rows.operand
    scores = key_product(
        scoring, warpgroup, rows, keys, stage, operand, KEY_PARTS, scoring.KEY_SLOPE is not None
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(keys.empty.index(stage), count=1)
    if warpgroup.EARLY_SINK:
        row_max = sink.to(gl.float32) * LOG2E
    last_tile = tiles.at(tiles.end - 1)
    probs, sink_weight, row_max, row_sum = weigh_tile(
        call, scoring, warpgroup, rows, scores, last_tile, row_max, row_sum, True, FIRST=True
    )
    weights = pack_weights(probs, keys.memory.dtype)
    if warpgroup.EARLY_SINK:
        columns = gl.arange(0, PART_KEYS, gl.SliceLayout(0, warpgroup.S_LAYOUT))
        is_sum = (columns == warpgroup.V_COLUMNS - 8)[None, :]
        acc = gl.where(is_sum, sink_weight[:, None], acc)
    past_end = work.seq_len - last_tile * call.config.BLOCK_N
    if call.config.KV_KIND == KV_PLAIN and not COPIED:
        # TMA fills whole pages past the end with zeros, but not the rest of the last page. (Float8
        # values are cleared when they are converted.) Without pages, the rows of the next request
        # follow.
        partial = past_end < call.config.BLOCK_N
        if call.config.BLOCK_SIZE > 0:
            partial = partial & (work.seq_len % call.config.BLOCK_SIZE != 0)
        if partial:
            mbarrier.wait(values.full.index(stage), parity)
            if warpgroup.V_COLUMNS > 0:
                PARTS: gl.constexpr = (call.config.DV + 31) // 32
                clear_value_parts(
                    values.memory,
                    stage,
                    past_end,
                    warpgroup.WARPGROUP,
                    call.config.CONSUMERS,
                    PARTS,
                    values.STAGES,
                )
            elif warpgroup.REST_COLUMNS > 0:
                for part in gl.static_range(LOADED_PARTS):
                    clear_values(
                        values.memory.index(stage * (LOADED_PARTS + SPARE_PARTS) + part),
                        past_end,
                        warpgroup.WARPGROUP,
                        call.config.CONSUMERS,
                    )
            else:
                clear_values(
                    values.memory.index(stage),
                    past_end,
                    warpgroup.WARPGROUP,
                    call.config.CONSUMERS,
                )
    return row_max, row_sum, acc, weights


@gluon.jit
def _second_range(
    call, scoring, warpgroup, rows, storage, tiles, step, row_max, row_sum, acc, weights
):
    """Visit the tiles of the second range, which lies at the right of the first one.

    Returns:
        (step, row_max, row_sum, acc, weights, the end of the tiles that are left, as if the last
        one had been visited already).
    """
    end = tiles.end
    full_end = gl.minimum(tiles.second_right_begin, end - 1)
    full_begin = gl.minimum(tiles.second_left_end, full_end)
    for back in range(0, end - 1 - full_end):
        row_max, row_sum, acc, weights = overlapped_step(
            call,
            scoring,
            warpgroup,
            rows,
            storage,
            step,
            row_max,
            row_sum,
            acc,
            weights,
            tiles.at(end - 2 - back),
            True,
        )
        step += 1
    for back in range(0, full_end - full_begin):
        row_max, row_sum, acc, weights = overlapped_step(
            call,
            scoring,
            warpgroup,
            rows,
            storage,
            step,
            row_max,
            row_sum,
            acc,
            weights,
            tiles.at(full_end - 1 - back),
            False,
            True,
        )
        step += 1
    return step, row_max, row_sum, acc, weights, full_begin + 1


@gluon.jit
def main_loop(call, scoring, warpgroup, rows, storage, tiles, step, row_max, row_sum, acc, weights):
    """Visit all tiles but the last one. Returns (step, row_max, row_sum, acc, weights)."""
    ROW: gl.constexpr = gl.SliceLayout(1, warpgroup.S_LAYOUT)
    # With bounds, unmasked tiles have scores that the function does not change.
    BOUNDS: gl.constexpr = call.config.RANGES > 0
    end = tiles.end
    if call.config.RANGES == 2:
        step, row_max, row_sum, acc, weights, end = _second_range(
            call, scoring, warpgroup, rows, storage, tiles, step, row_max, row_sum, acc, weights
        )
    full_end = gl.minimum(tiles.right_begin, end - 1)
    full_begin = gl.minimum(tiles.left_end, full_end)
    for back in range(0, end - 1 - full_end):
        row_max, row_sum, acc, weights = overlapped_step(
            call,
            scoring,
            warpgroup,
            rows,
            storage,
            step,
            row_max,
            row_sum,
            acc,
            weights,
            tiles.at(end - 2 - back),
            True,
        )
        step += 1
    if call.config.SIGN_SOFTMAX:
        LANES: gl.constexpr = row_sum.type.layout
        row_max = lane_references(row_max, LANES)
    for back in range(0, full_end - full_begin):
        row_max, row_sum, acc, weights = overlapped_step(
            call,
            scoring,
            warpgroup,
            rows,
            storage,
            step,
            row_max,
            row_sum,
            acc,
            weights,
            full_end - 1 - back,
            False,
            BOUNDS,
        )
        step += 1
    if call.config.SIGN_SOFTMAX:
        row_max = row_references(row_max, ROW)
    if warpgroup.CHECK_FIRST or BOUNDS:
        for back in range(0, full_begin - tiles.begin):
            row_max, row_sum, acc, weights = overlapped_step(
                call,
                scoring,
                warpgroup,
                rows,
                storage,
                step,
                row_max,
                row_sum,
                acc,
                weights,
                full_begin - 1 - back,
                True,
            )
            step += 1
    return step, row_max, row_sum, acc, weights


@gluon.jit
def last_values(call, warpgroup, storage, step, acc, weights):
    """Multiply by the values of the first tile, the last one visited."""
    values = storage.values
    stage = (step - 1) % values.STAGES
    wait_for_tile(values.full, stage, ((step - 1) // values.STAGES) & 1, call.config.GATHERS)
    acc = value_product(warpgroup, values, stage, weights, acc, storage.keys.memory.dtype)
    if warpgroup.REST_COLUMNS > 0:
        acc = wait_for_both(acc)
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values.empty.index(stage), count=1)
    return acc
