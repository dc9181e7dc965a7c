"""The batch-invariant Hopper prefill (M15): `prefill.py` with sums over segments of keys.

Loaders, work items and tiles are those of `hopper_prefill_kernel`. The consumers add up each
segment of keys from zero. The segments of a work item are added in shared memory, because two
accumulators and the scores of a tile do not fit in registers; those of more than 128 elements in
global memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.compat import (
    exp2,
    launch_dependent_grids,
    partition_barrier,
    reinterpret,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.instruction_order import before_wait
from attnlib.ops.triton.hopper.kernels.mailbox import read_field
from attnlib.ops.triton.hopper.kernels.mainloop import pack_weights, unpack_weights
from attnlib.ops.triton.hopper.kernels.prefill import (
    UNALIGNED,
    UNSPECIALIZED,
    aligned_offset,
    clear_values,
    item_rows,
    key_loader,
    store_rows,
    value_loader,
)
from attnlib.ops.triton.hopper.kernels.schedule import visible_span, visited_tiles
from attnlib.ops.triton.hopper.kernels.segments import (
    add_row_sums,
    cap_scores,
    fold_sums,
    row_sums,
    segment_tiles,
    softmax_factor,
    sum_rows,
)
from attnlib.ops.triton.hopper.kernels.softmax import LN2, LOG2E, mask_scores, score_factor

__all__ = ["invariant_prefill_kernel"]


@gluon.jit
def _weigh(
    scores, tile, row_first, row_last, row_max, factor, soft_cap, MASKED: gl.constexpr,
    CHECK_FIRST: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Return (weights [M, N], factor [M] of what was added before, row_max) of raw products."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    scores = cap_scores(scores, factor, soft_cap, HAS_CAP)
    if MASKED:
        scores = mask_scores(scores, row_first, row_last, tile * BLOCK_N, CHECK_FIRST)
    weight_factor = softmax_factor(factor, HAS_CAP)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * weight_factor)
    finite_max = new_max
    if MASKED:
        # -inf - -inf is NaN: rows without a visible key are measured from 0.
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * weight_factor - finite_max[:, None])
    return weights, exp2(row_max - finite_max), new_max


@gluon.constexpr_function
def _by_thread(width):
    """Return the layout of float32 sums [64, width], in which each thread of a warpgroup accesses
    16 bytes at a time without bank conflicts."""
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    columns = [[0, 8 << bit] for bit in range((width // 8).bit_length() - 1)]
    return gl.SharedLinearLayout([[0, 1], [8, 0], *lanes, *columns, [16, 0], [32, 0]])


@gluon.jit
def _halves(tile):
    """Return the first and the second half of the columns of a tile in registers."""
    parts = gl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2])
    left, right = gl.split(gl.permute(parts, (0, 2, 1)))
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile.shape[1] // 2, 16])
    return gl.convert_layout(left, LAYOUT), gl.convert_layout(right, LAYOUT)


@gluon.jit
def _store_staged(
    out, staged, rows, start, first_token, query_len, kv_head, stride_ot, stride_oh, column,
    WARPGROUP: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr, TILE_TOKENS: gl.constexpr,
):  # fmt: skip
    """Store output rows through shared memory, so that stores are 16 bytes wide.

    Args:
        staged: shared memory of the warpgroup, [64, width].
        rows: [64, width], the elements of the output from `column` on.
    """
    WIDTH: gl.constexpr = staged.shape[1]
    LANES: gl.constexpr = min(32, WIDTH // 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    partition_barrier()
    staged.store(rows)
    partition_barrier()
    token, head, valid = _item_rows(
        first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS, gl.SliceLayout(1, LAYOUT)
    )
    offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
    content = staged.load(LAYOUT)
    # All warps have loaded before the memory is used again.
    partition_barrier()
    store_rows(out + column, offsets, content, valid, DV - column)


@gluon.jit
def _item_rows(
    first_token, query_len, kv_head, WARPGROUP: gl.constexpr, GROUP: gl.constexpr,
    TILE_TOKENS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """`prefill.item_rows`, for query tiles that may begin before the first token."""
    token, head, valid = item_rows(
        first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS, layout
    )
    return token, head, valid & (token >= 0)


@gluon.jit
def _add_segment(
    total_tile, acc, total_max, total_sum, row_max, sums, first, last, O_LAYOUT: gl.constexpr,
    GLOBAL: gl.constexpr,
):  # fmt: skip
    """Add a complete segment to those before it.

    Args:
        total_tile: memory of the sums of values, shared, or global with GLOBAL; a thread reads what
            it has written.
        first: whether no segment is before it.
        last: whether none follows, so that the sum needs not be stored.

    Returns:
        (sums of values, total_max, total_sum).
    """
    ROW: gl.constexpr = row_max.type.layout
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    total_max, total_sum, old, new = fold_sums(total_max, total_sum, row_max, sum_rows(sums, ROW))
    # A sum of -0.0 becomes 0.0, as in the decode.
    acc = acc * gl.convert_layout(new, O_ROW)[:, None] + 0.0
    if GLOBAL:
        # Two elements of a thread after those of the threads before it: the accesses of a warp are
        # 256 consecutive bytes.
        rows = gl.arange(0, 64, O_ROW)
        columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, O_LAYOUT))
        rows = rows // 16 * 64 + rows // 8 % 2 * 256 + rows % 8 * 8
        columns = columns // 8 * 512 + columns % 8
        pointers = total_tile + rows[:, None] + columns[None, :]
    if not first:
        if GLOBAL:
            before = gl.load(pointers)
        else:
            before = total_tile.load(O_LAYOUT)
        factors = gl.convert_layout(old, O_ROW)[:, None]
        acc = gl.fma(before, gl.broadcast(factors, before)[0], acc)
    if not last:
        if GLOBAL:
            gl.store(pointers, acc)
        else:
            total_tile.store(acc)
    return acc, total_max, total_sum


@gluon.jit
def _step(
    q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, total_tile, acc, weights, row_max,
    sums, total_max, total_sum, step, tile, end, tiles, row_first, row_last, factor, soft_cap,
    STAGES: gl.constexpr, MASKED: gl.constexpr, CHECK_FIRST: gl.constexpr, HAS_CAP: gl.constexpr,
    P_LAYOUT: gl.constexpr, GLOBAL: gl.constexpr,
):  # fmt: skip
    """`mainloop.overlapped_step`: multiply by the keys of `tile` and by the values of the tile
    before it. Where `tile` begins a segment, the complete one is added to those before it.

    Args:
        end: the end of the visited tiles.
        tiles: of a segment.

    Returns:
        (acc, packed weights of `tile`, row_max, sums, total_max, total_sum).
    """
    DTYPE: gl.constexpr = k_ring.dtype
    S_LAYOUT: gl.constexpr = row_last.type.layout.parent
    O_LAYOUT: gl.constexpr = acc.type.layout
    ORDERED: gl.constexpr = acc.shape[1] == 128
    stage = step % STAGES
    v_stage = (step - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(
        q_tile, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(v_stage), ((step - 1) // STAGES) & 1)
    # The first product of a segment begins from 0.
    acc = warpgroup_mma(
        unpack_weights(weights, DTYPE, P_LAYOUT), v_ring.index(v_stage), acc,
        use_acc=((tile + 2) & (tiles - 1)) != 0, is_async=True,
    )  # fmt: skip
    # One group may stay in flight: Q @ K^T is complete, P @ V overlaps with the softmax.
    scores = warpgroup_mma_wait(1, deps=[scores])
    if not ORDERED:
        mbarrier.arrive(k_empty.index(stage), count=1)
    begins = ((tile + 1) & (tiles - 1)) == 0
    before = gl.where(begins, float("-inf"), row_max)
    probs, acc_scale, next_max = _weigh(
        scores, tile, row_first, row_last, before, factor, soft_cap, MASKED, CHECK_FIRST, HAS_CAP
    )
    # All arithmetic of the softmax comes before the branch, over which ptxas moves nothing.
    if ORDERED:
        probs = before_wait(probs)
    more = row_sums(probs)
    # P @ V is complete: its stage is free, and the accumulator may be rescaled.
    acc = warpgroup_mma_wait(0, deps=[acc])
    if ORDERED:
        # An arrival synchronizes the warps, which would delay the softmax.
        mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    packed = pack_weights(probs, DTYPE)
    # A complete segment is left as it is, and the next product overwrites it.
    kept = gl.where(begins, 1.0, acc_scale)
    acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, O_LAYOUT))[:, None]
    if begins:
        acc, total_max, total_sum = _add_segment(
            total_tile, acc, total_max, total_sum, row_max, sums, tile + 1 + tiles >= end, False,
            O_LAYOUT, GLOBAL)  # fmt: skip
    sums = add_row_sums(sums, acc_scale, more)
    return acc, packed, next_max, sums, total_max, total_sum


@gluon.jit
def _consumer(
    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs, concurrent, stride_qt,
    stride_qh,
    stride_ot, stride_oh, stride_lt, mailbox, q_tiles, k_ring, v_ring, totals, staging, mail_full,
    mail_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty, WARPGROUP: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, TILE_TOKENS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, LOAD_QUERY: gl.constexpr, STAGED_STORE: gl.constexpr,
    FIELDS: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, GLOBAL: gl.constexpr,
):  # fmt: skip
    """Compute the 64 rows of consumer warpgroup WARPGROUP of each published work item."""
    WIDTH: gl.constexpr = q_tiles.shape[2]
    WIDTH_V: gl.constexpr = v_ring.shape[2]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    DTYPE: gl.constexpr = q_tiles.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LANES: gl.constexpr = min(32, WIDTH // 8)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // Q_LANES, Q_LANES], [4, 1], [1, 0])
    V_LANES: gl.constexpr = min(32, WIDTH_V // 8)
    STORE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // V_LANES, V_LANES], [4, 1], [1, 0])
    O_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH_V], DTYPE)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    CHECK_LEFT: gl.constexpr = HAS_LEFT or HAS_CHUNK
    factor = score_factor(scale, soft_cap, HAS_CAP)
    if GLOBAL:
        total_tile = totals + (gl.program_id(0) * CONSUMERS + WARPGROUP) * (64 * WIDTH_V)
    else:
        total_tile = totals
    if concurrent == 0:
        # PDL: the previous kernel may have written the queries or read the output.
        wait_on_dependent_grids()
        launch_dependent_grids()

    mail = 0
    loaded = 0
    step = 0
    request = 0
    while request >= 0:
        slot = mail % 2
        # Wait for the key loader to publish the next item, copy it, and release the slot.
        mbarrier.wait(mail_full.index(slot), (mail // 2) & 1)
        request = read_field(mailbox, slot * FIELDS)
        start = read_field(mailbox, slot * FIELDS + 1)
        first_token = read_field(mailbox, slot * FIELDS + 2)
        kv_head = read_field(mailbox, slot * FIELDS + 3)
        query_len = read_field(mailbox, slot * FIELDS + 4)
        seq_len = read_field(mailbox, slot * FIELDS + 5)
        mbarrier.arrive(mail_empty.index(slot), count=1)
        mail += 1
        if request == num_reqs:
            # Rows after the last request become 0 (M6).
            token, head, valid = _item_rows(
                first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS,
                gl.SliceLayout(1, STORE_LAYOUT))  # fmt: skip
            offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
            store_rows(out, offsets, gl.zeros([64, WIDTH_V], DTYPE, STORE_LAYOUT), valid, DV)
            if HAS_LSE:
                empty_lse = gl.full(
                    [64], float("-inf"), gl.float32, gl.SliceLayout(1, STORE_LAYOUT)
                )
                gl.store(
                    lse + (start + token).to(gl.int64) * stride_lt + head, empty_lse, mask=valid
                )
        if (request >= 0) & (request < num_reqs):
            begin, left_end, right_begin, end = visited_tiles(
                first_token, query_len, seq_len, left, right, chunk, request, None, None,
                TILE_TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip

            q_stage = loaded % Q_STAGES
            q_tile = q_tiles.index(q_stage * CONSUMERS + WARPGROUP)
            if LOAD_QUERY:
                # Wait for the TMA loads of this item's queries.
                mbarrier.wait(q_full.index(q_stage), (loaded // Q_STAGES) & 1)
            else:
                # No box covers the rows (GROUP does not divide 64): the warpgroup loads its own.
                token, head, valid = _item_rows(
                    first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS,
                    gl.SliceLayout(1, Q_LAYOUT))  # fmt: skip
                offsets = aligned_offset(
                    (start + token).to(gl.int64) * stride_qt + head.to(gl.int64) * stride_qh
                )
                columns = gl.arange(0, WIDTH, gl.SliceLayout(0, Q_LAYOUT))
                mask = valid[:, None] & (columns < D)[None, :]
                q = gl.load(query + offsets[:, None] + columns[None, :], mask=mask, other=0.0)
                # All warps are done with the previous queries before they are overwritten.
                partition_barrier()
                q_tile.store(q)
                fence_async_shared()
                partition_barrier()
            loaded += 1

            token, head, valid = _item_rows(
                first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS, ROW
            )
            row_first, row_last = visible_span(
                token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            tiles = segment_tiles(first_token + (seq_len - query_len), WIDTH_V, BLOCK_N, GROUP)
            total_max = gl.full([64], float("-inf"), gl.float32, ROW)
            total_sum = gl.full([64], 0.0, gl.float32, ROW)
            acc = gl.zeros([64, WIDTH_V], gl.float32, O_LAYOUT)
            row_max = gl.full([64], float("-inf"), gl.float32, ROW)
            if end > begin:
                # Prologue: the last tile has no values of an earlier tile to multiply by.
                stage = step % STAGES
                parity = (step // STAGES) & 1
                mbarrier.wait(k_full.index(stage), parity)
                zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
                scores = warpgroup_mma(
                    q_tile,
                    k_ring.index(stage).permute((1, 0)),
                    zeros,
                    use_acc=False,
                    is_async=True,
                )
                scores = warpgroup_mma_wait(0, deps=[scores])
                mbarrier.arrive(k_empty.index(stage), count=1)
                probs, _, row_max = _weigh(
                    scores, end - 1, row_first, row_last, row_max, factor, soft_cap, True,
                    CHECK_LEFT, HAS_CAP)  # fmt: skip
                sums = row_sums(probs)
                weights = pack_weights(probs, DTYPE)
                past_end = seq_len - (end - 1) * BLOCK_N
                # TMA fills whole pages past the end with zeros, but not the rest of the last page.
                if (past_end < BLOCK_N) & (seq_len % BLOCK_SIZE != 0):
                    mbarrier.wait(v_full.index(stage), parity)
                    clear_values(v_ring.index(stage), past_end, WARPGROUP, CONSUMERS)
                step += 1

                # Main loop: masked tiles at the diagonal, unmasked tiles, masked tiles at the left.
                full_end = gl.minimum(right_begin, end - 1)
                full_begin = gl.minimum(left_end, full_end)
                for back in range(0, end - 1 - full_end):
                    acc, weights, row_max, sums, total_max, total_sum = _step(
                        q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, total_tile, acc,
                        weights, row_max, sums, total_max, total_sum, step, end - 2 - back, end,
                        tiles, row_first, row_last, factor, soft_cap, STAGES,
                        True, CHECK_LEFT, HAS_CAP, P_LAYOUT, GLOBAL)  # fmt: skip
                    step += 1
                for back in range(0, full_end - full_begin):
                    acc, weights, row_max, sums, total_max, total_sum = _step(
                        q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, total_tile, acc,
                        weights, row_max, sums, total_max, total_sum, step, full_end - 1 - back,
                        end, tiles, row_first, row_last, factor, soft_cap, STAGES,
                        False, CHECK_LEFT, HAS_CAP, P_LAYOUT, GLOBAL)  # fmt: skip
                    step += 1
                if CHECK_LEFT:
                    for back in range(0, full_begin - begin):
                        acc, weights, row_max, sums, total_max, total_sum = _step(
                            q_tile, k_ring, v_ring, k_full, k_empty, v_full, v_empty, total_tile,
                            acc, weights, row_max, sums, total_max, total_sum, step,
                            full_begin - 1 - back, end, tiles, row_first, row_last,
                            factor, soft_cap, STAGES, True, CHECK_LEFT, HAS_CAP,
                            P_LAYOUT, GLOBAL)  # fmt: skip
                        step += 1

                if LOAD_QUERY:
                    # All products with the queries are complete: the next ones may arrive by TMA.
                    mbarrier.arrive(q_empty.index(q_stage), count=1)
                # Epilogue: the product with the values of the first tile, the last one visited.
                stage = (step - 1) % STAGES
                mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
                acc = warpgroup_mma(
                    unpack_weights(weights, DTYPE, P_LAYOUT),
                    v_ring.index(stage),
                    acc,
                    use_acc=((begin + 1) & (tiles - 1)) != 0,
                    is_async=True,
                )
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(stage), count=1)
                first = (end - 1) // tiles * tiles <= begin
                acc, total_max, total_sum = _add_segment(
                    total_tile, acc, total_max, total_sum, row_max, sums, first, True, O_LAYOUT,
                    GLOBAL)  # fmt: skip
            elif LOAD_QUERY:
                mbarrier.arrive(q_empty.index(q_stage), count=1)

            finite_max = gl.where(total_max == float("-inf"), 0.0, total_max)
            acc_scale = gl.full([64], 1.0, gl.float32, ROW)
            if HAS_SINK:
                # The sink counts in the denominator, once (M4).
                sink = gl.load(sinks + head, mask=valid, other=0.0).to(gl.float32) * LOG2E
                new_max = gl.maximum(total_max, sink)
                finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
                acc_scale = exp2(total_max - finite_max)
                total_sum = gl.fma(total_sum, acc_scale, exp2(sink - finite_max))
            empty = total_sum == 0.0
            safe_sum = gl.where(empty, 1.0, total_sum)
            if HAS_LSE:
                natural = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum)) * LN2
                gl.store(lse + (start + token).to(gl.int64) * stride_lt + head, natural, mask=valid)
            normalizer = gl.convert_layout(acc_scale / safe_sum, O_ROW)
            rows = (acc * normalizer[:, None]).to(DTYPE)
            if STAGED_STORE and GLOBAL:
                # Memory for all columns does not fit.
                first_half, second_half = _halves(rows)
                _store_staged(
                    out, staging, first_half, start, first_token, query_len, kv_head, stride_ot,
                    stride_oh, 0, WARPGROUP, GROUP, DV, TILE_TOKENS)  # fmt: skip
                _store_staged(
                    out, staging, second_half, start, first_token, query_len, kv_head, stride_ot,
                    stride_oh, WIDTH_V // 2, WARPGROUP, GROUP, DV, TILE_TOKENS)  # fmt: skip
            elif STAGED_STORE:
                # In the memory of the sums.
                staged = reinterpret(total_tile, DTYPE, [64, WIDTH_V], O_SHARED)
                _store_staged(
                    out, staged, rows, start, first_token, query_len, kv_head, stride_ot, stride_oh,
                    0, WARPGROUP, GROUP, DV, TILE_TOKENS)  # fmt: skip
            else:
                token, head, valid = _item_rows(
                    first_token, query_len, kv_head, WARPGROUP, GROUP, TILE_TOKENS, O_ROW
                )
                offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
                store_rows(out, offsets, rows, valid, DV)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def invariant_prefill_kernel(
    key_desc, value_desc, query_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2,
    aux3, query_start_loc, seq_lens, block_table, counters, totals_memory, scale, soft_cap, left,
    right, chunk, num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks, stride_qt,
    stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, TILE_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, LOAD_QUERY: gl.constexpr, PERSISTENT: gl.constexpr,
    STAGED_STORE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps for each of one to three consumers and 1 + 1 loader warps.

    Runtime arguments, grid and constants are those of `hopper_prefill_kernel`, which has more
    constants. One consumer has the registers that the loaders leave. Also,

    Args:
        totals_memory: float32 [grid, CONSUMERS, 64 * WIDTH_V], where shared memory is too small for
            sums of values; else None.
    """
    FIELDS: gl.constexpr = 6
    DTYPE: gl.constexpr = key_desc.dtype
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], DTYPE)
    K_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH], DTYPE)
    V_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH_V], DTYPE)
    T_SHARED: gl.constexpr = _by_thread(WIDTH_V)
    q_tiles = gl.allocate_shared_memory(DTYPE, [Q_STAGES * CONSUMERS, 64, WIDTH], Q_SHARED)
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, WIDTH], K_SHARED)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, WIDTH_V], V_SHARED)
    if totals_memory is not None:
        totals0 = totals_memory
        totals1 = totals_memory
        H_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH_V // 2], DTYPE)
        staging_ring = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 64, WIDTH_V // 2], H_SHARED)
        staging0 = staging_ring.index(0)
        staging1 = staging0
        if CONSUMERS > 1:
            staging1 = staging_ring.index(1)
    else:
        totals0 = gl.allocate_shared_memory(gl.float32, [64, WIDTH_V], T_SHARED)
        totals1 = totals0
        if CONSUMERS > 1:
            totals1 = gl.allocate_shared_memory(gl.float32, [64, WIDTH_V], T_SHARED)
        staging0 = totals0
        staging1 = totals1
    # Two slots, so that the key loader can publish an item while the last one is being processed.
    mailbox = gl.allocate_shared_memory(
        gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(mail_full.index(slot), count=1)
        mbarrier.init(mail_empty.index(slot), count=CONSUMERS + 1)
    for stage in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consumer, (
                    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs,
                    concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, mailbox,
                    q_tiles, k_ring, v_ring, totals0, staging0, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, 0, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE,
                    totals_memory is not None)),
                (key_loader, (
                    key_desc, query_desc, query_start_loc, seq_lens, block_table, counters, left,
                    right, chunk, num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks,
                    stride_table, mailbox, q_tiles, k_ring, mail_full, mail_empty, q_full, q_empty,
                    k_full, k_empty, None, None, None, None, None, None, None, 0, NUM_KV_HEADS, 1,
                    GROUP, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS,
                    LOAD_QUERY, PERSISTENT, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, D, DV,
                    1, True)),
                (value_loader, (
                    value_desc, block_table, left, right, chunk, num_reqs, num_blocks, stride_table,
                    mailbox, v_ring, mail_full, mail_empty, v_full, v_empty, 0, 1, TILE_TOKENS,
                    BLOCK_N, BLOCK_SIZE, STAGES, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
            ],
            [1, 1],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 3:
        totals2 = totals_memory
        if totals_memory is None:
            totals2 = gl.allocate_shared_memory(gl.float32, [64, WIDTH_V], T_SHARED)
        gl.warp_specialize(
            [
                (_consumer, (
                    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs,
                    concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, mailbox,
                    q_tiles, k_ring, v_ring, totals0, staging0, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, 0, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE,
                    totals_memory is not None)),
                (_consumer, (
                    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs,
                    concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, mailbox,
                    q_tiles, k_ring, v_ring, totals1, staging1, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, 1, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE,
                    totals_memory is not None)),
                (_consumer, (
                    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs,
                    concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, mailbox,
                    q_tiles, k_ring, v_ring, totals2, totals2, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, 2, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE,
                    totals_memory is not None)),
                (key_loader, (
                    key_desc, query_desc, query_start_loc, seq_lens, block_table, counters, left,
                    right, chunk, num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks,
                    stride_table, mailbox, q_tiles, k_ring, mail_full, mail_empty, q_full, q_empty,
                    k_full, k_empty, None, None, None, None, None, None, None, 0, NUM_KV_HEADS, 1,
                    GROUP, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS,
                    LOAD_QUERY, PERSISTENT, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, D, DV,
                    1, True)),
                (value_loader, (
                    value_desc, block_table, left, right, chunk, num_reqs, num_blocks, stride_table,
                    mailbox, v_ring, mail_full, mail_empty, v_full, v_empty, 0, 1, TILE_TOKENS,
                    BLOCK_N, BLOCK_SIZE, STAGES, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs,
                    concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, mailbox,
                    q_tiles, k_ring, v_ring, totals0, staging0, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, 0, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE,
                    totals_memory is not None)),
                (_consumer, (
                    query, out, lse, sinks, scale, soft_cap, left, right, chunk, num_reqs,
                    concurrent, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, mailbox,
                    q_tiles, k_ring, v_ring, totals1, staging1, mail_full, mail_empty, q_full,
                    q_empty, k_full, k_empty, v_full, v_empty, 1, GROUP, D, DV, TILE_TOKENS,
                    BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS, LOAD_QUERY, STAGED_STORE, FIELDS,
                    CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE,
                    totals_memory is not None)),
                (key_loader, (
                    key_desc, query_desc, query_start_loc, seq_lens, block_table, counters, left,
                    right, chunk, num_reqs, num_tokens, num_tiles, concurrent, section, num_blocks,
                    stride_table, mailbox, q_tiles, k_ring, mail_full, mail_empty, q_full, q_empty,
                    k_full, k_empty, None, None, None, None, None, None, None, 0, NUM_KV_HEADS, 1,
                    GROUP, TILE_TOKENS, BLOCK_N, BLOCK_SIZE, STAGES, Q_STAGES, CONSUMERS,
                    LOAD_QUERY, PERSISTENT, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, D, DV,
                    1, True)),
                (value_loader, (
                    value_desc, block_table, left, right, chunk, num_reqs, num_blocks, stride_table,
                    mailbox, v_ring, mail_full, mail_empty, v_full, v_empty, 0, 1, TILE_TOKENS,
                    BLOCK_N, BLOCK_SIZE, STAGES, FIELDS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)),
            ],
            [4, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
