"""The Hopper decode kernel over latents: values are a prefix of the keys (P10, M12).

Work distribution, partial results and their combination are those of `decode`: blocks of up to 64
query heads take the place of KV heads, and all of them read the one KV head of the cache.

A CTA has two warpgroups and no loader warps. A tile of 64 latents is loaded once by TMA, in three
parts: two halves of the values and the rotary part. The scores Q @ K^T are divided by keys between
the warpgroups, the products P @ V by elements of the values, so that each warpgroup accumulates
64 rows of 256 elements. While a tile is used, the next one is loaded.
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
    load_box,
    partition_barrier,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode import (
    UNALIGNED,
    UNSPECIALIZED,
    num_key_tiles,
    tile_range,
)
from attnlib.ops.triton.hopper.kernels.schedule import visible_span, visited_tiles
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    add_sink,
    mask_scores,
    score_factor,
    transform_scores,
)

__all__ = ["hopper_latent_decode_kernel"]


@gluon.jit
def _load_tile(
    value_desc, key_desc, table, pages, num_blocks, tile, low, high, rotary, full, step,
    BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Issue the TMA loads of latent tile `tile` into stage `step % STAGES`.

    All warps have finished with the tile that the stage held before.
    """
    BLOCK_N: gl.constexpr = low.shape[1]
    HALF: gl.constexpr = low.shape[2]
    BOX: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    BOXES: gl.constexpr = BLOCK_N // BOX
    BYTES: gl.constexpr = BLOCK_N * (2 * HALF + rotary.shape[2]) * 2
    first_page = tile * BLOCK_N // BLOCK_SIZE
    inside = tile * BLOCK_N % BLOCK_SIZE
    stage = step % STAGES
    barrier = full.index(stage)
    mbarrier.expect(barrier, BYTES)
    for box in gl.static_range(BOXES):
        # Pages past the last one become block `num_blocks`, which is out of bounds: TMA fills their
        # boxes with zeros.
        page = gl.load(table + first_page + box, mask=first_page + box < pages, other=num_blocks)
        load_box(
            value_desc, [page, 0, inside, 0], barrier, low.index(stage).slice(box * BOX, BOX, 0)
        )
        load_box(
            value_desc, [page, 0, inside, HALF], barrier,
            high.index(stage).slice(box * BOX, BOX, 0),
        )  # fmt: skip
        load_box(
            key_desc, [page, 0, inside, 2 * HALF], barrier,
            rotary.index(stage).slice(box * BOX, BOX, 0),
        )  # fmt: skip


@gluon.jit
def _store_queries(target, query, offsets, valid, START: gl.constexpr):
    """Copy the elements of the queries from START on to a tile in shared memory."""
    ROWS: gl.constexpr = target.shape[0]
    WIDTH: gl.constexpr = target.shape[1]
    LANES: gl.constexpr = min(32, WIDTH // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [8, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = START + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    starts = gl.convert_layout(offsets, gl.SliceLayout(1, layout))
    mask = gl.convert_layout(valid.to(gl.int32), gl.SliceLayout(1, layout)) != 0
    content = gl.load(
        query + starts[:, None] + columns[None, :],
        mask=mask[:, None] & (rows[:, None] < ROWS),
        other=0.0,
    )
    target.store(content)


@gluon.jit
def _clear_rows_from(tile, valid):
    """Set the rows of a tile from `valid` on to 0: a page may hold anything past the sequence's
    end, and 0 * NaN is NaN (P5)."""
    ROWS: gl.constexpr = tile.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    content = tile.load(layout)
    tile.store(gl.where(rows[:, None] < valid, content, 0.0))


@gluon.jit
def _store_half(
    out, partials, acc, factor, offsets, partial_offsets, valid, num_splits, START: gl.constexpr,
):  # fmt: skip
    """Write one half of the results: the output of a single split, else a partial result."""
    LAYOUT: gl.constexpr = acc.type.layout
    lanes = START + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    result = acc * factor[:, None]
    mask = valid[:, None] & (lanes >= 0)[None, :]
    if num_splits == 1:
        gl.store(
            out + offsets[:, None] + lanes[None, :], result.to(out.dtype.element_ty), mask=mask
        )
    else:
        gl.store(partials + partial_offsets[:, None] + lanes[None, :], result, mask=mask)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_latent_decode_kernel(
    key_desc, value_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr, ROTARY: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """One CTA of 8 warps. Grid: tile ranges * NUM_KV_HEADS, all resident at the same time.

    Args:
        key_desc: TMA descriptor of the keys, in boxes of ROTARY elements.
        value_desc: TMA descriptor of the values, in boxes of DV / 2 elements.
        partials: float32 partial outputs, [2 * grid, rows, DV].
        partial_lses: float32 base-2 LSEs of the partial outputs, [2 * grid, rows].
        split_headers: int32 [tokens, NUM_KV_HEADS] for `hopper_combine_kernel`.
        rows: GROUP times the largest query length, at most ROWS.
        NUM_KV_HEADS: blocks of GROUP query heads.
        k_scale, v_scale, aux0 to aux3, counters, rows0 to columns3: not used; the arguments are
            those of `hopper_decode_kernel`.
    """
    HALF: gl.constexpr = DV // 2
    DTYPE: gl.constexpr = key_desc.dtype
    # [rows, keys] and [rows, elements of a half]; keys and elements are divided between the two
    # warpgroups.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HALF // 2, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    CHECK_LEFT: gl.constexpr = HAS_LEFT or HAS_CHUNK
    Q_HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], DTYPE)
    Q_ROTARY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROTARY], DTYPE)
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N], DTYPE)
    K_HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], DTYPE)
    K_ROTARY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROTARY], DTYPE)
    q_low = gl.allocate_shared_memory(DTYPE, [ROWS, HALF], Q_HALF)
    q_high = gl.allocate_shared_memory(DTYPE, [ROWS, HALF], Q_HALF)
    q_rotary = gl.allocate_shared_memory(DTYPE, [ROWS, ROTARY], Q_ROTARY)
    p_tile = gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_N], P_SHARED)
    k_low = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, HALF], K_HALF)
    k_high = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, HALF], K_HALF)
    k_rotary = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, ROTARY], K_ROTARY)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for ring_stage in gl.static_range(STAGES):
        mbarrier.init(full.index(ring_stage), count=1)
    # Makes the initialized barriers visible to TMA and to all warps.
    fence_async_shared()
    partition_barrier()

    factor = score_factor(scale, soft_cap, HAS_CAP)
    weight_factor = factor
    if HAS_CAP:
        weight_factor = 1.0
    # PDL: the previous kernel may have written the queries, the cache or the lengths. The combine
    # kernel may start; it waits for this kernel's results by itself.
    wait_on_dependent_grids()
    launch_dependent_grids()
    range_begin, range_end, per_range, request, before = tile_range(
        query_start_loc, seq_lens, left, right, chunk, num_reqs, gl.program_id(0) // NUM_KV_HEADS,
        gl.num_programs(0) // NUM_KV_HEADS, None, None, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK)  # fmt: skip
    head_block = gl.program_id(0) % NUM_KV_HEADS
    row = gl.arange(0, ROWS, ROW)
    token = row // GROUP
    head = head_block * GROUP + row % GROUP
    position = range_begin
    step = 0
    while position < range_end:
        tiles = num_key_tiles(
            query_start_loc, seq_lens, request, True, left, right, chunk, None, None, BLOCK_N,
            CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        request_end = before + tiles
        if position < request_end:
            # One split: tiles [skipped, skipped + count) of the request.
            skipped = position - before
            count = gl.minimum(tiles - skipped, range_end - position)
            start = gl.load(query_start_loc + request)
            query_len = gl.load(query_start_loc + request + 1) - start
            seq_len = gl.load(seq_lens + request)
            first_tile, _, _, _ = visited_tiles(
                0, query_len, seq_len, left, right, chunk, request, None, None, TILE_TOKENS,
                BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            first_tile += skipped
            table = block_table + request.to(gl.int64) * stride_table
            pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
            valid = (row < TILE_TOKENS * GROUP) & (token < query_len)
            # All warps are done with the previous split's tiles and queries.
            partition_barrier()
            _load_tile(
                value_desc, key_desc, table, pages, num_blocks, first_tile, k_low, k_high, k_rotary,
                full, step, BLOCK_SIZE, STAGES)  # fmt: skip
            if count > 1:
                _load_tile(
                    value_desc, key_desc, table, pages, num_blocks, first_tile + 1, k_low, k_high,
                    k_rotary, full, step + 1, BLOCK_SIZE, STAGES)  # fmt: skip
            q_offsets = (start + token).to(gl.int64) * stride_qt + head.to(gl.int64) * stride_qh
            # The launcher checks 16-byte alignment; the shifts tell the compiler.
            q_offsets = (q_offsets >> 3) << 3
            _store_queries(q_low, query, q_offsets, valid, 0)
            _store_queries(q_high, query, q_offsets, valid, HALF)
            _store_queries(q_rotary, query, q_offsets, valid, DV)
            fence_async_shared()
            partition_barrier()

            row_first, row_last = visible_span(
                token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            # Kept per key and reduced once per split, not once per tile.
            row_sum = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
            acc_low = gl.zeros([ROWS, HALF], gl.float32, VALUES)
            acc_high = gl.zeros([ROWS, HALF], gl.float32, VALUES)
            for i in range(0, count):
                tile = first_tile + i
                stage = (step + i) % STAGES
                mbarrier.wait(full.index(stage), ((step + i) // STAGES) & 1)
                scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
                scores = warpgroup_mma(
                    q_low, k_low.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True
                )
                scores = warpgroup_mma(
                    q_high, k_high.index(stage).permute((1, 0)), scores, is_async=True
                )
                scores = warpgroup_mma(
                    q_rotary, k_rotary.index(stage).permute((1, 0)), scores, is_async=True
                )
                scores = warpgroup_mma_wait(0, deps=[scores])
                scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
                scores = mask_scores(scores, row_first, row_last, tile * BLOCK_N, CHECK_LEFT)
                new_max = gl.maximum(row_max, gl.max(scores, 1) * weight_factor)
                # -inf - -inf is NaN: rows without a visible key are measured from 0.
                finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
                weights = exp2(scores * weight_factor - finite_max[:, None])
                acc_scale = exp2(row_max - finite_max)
                row_max = new_max
                row_sum = row_sum * acc_scale[:, None] + weights
                p_tile.store(weights.to(DTYPE))
                past_end = seq_len - tile * BLOCK_N
                # TMA fills whole pages past the end with zeros, but not the rest of the last page.
                if (past_end < BLOCK_N) & (seq_len % BLOCK_SIZE != 0):
                    # Both warpgroups have read the keys.
                    partition_barrier()
                    _clear_rows_from(k_low.index(stage), past_end)
                    _clear_rows_from(k_high.index(stage), past_end)
                # WGMMA reads shared memory through the async proxy: fence, then wait for all warps.
                fence_async_shared()
                partition_barrier()
                out_scale = gl.convert_layout(acc_scale, OUT_ROW)
                acc_low = acc_low * out_scale[:, None]
                acc_high = acc_high * out_scale[:, None]
                acc_low = warpgroup_mma(p_tile, k_low.index(stage), acc_low, is_async=True)
                acc_high = warpgroup_mma(p_tile, k_high.index(stage), acc_high, is_async=True)
                acc_low, acc_high = warpgroup_mma_wait(0, deps=[acc_low, acc_high])
                # All warps are done with the stage and with the weights.
                partition_barrier()
                if i + STAGES < count:
                    _load_tile(
                        value_desc, key_desc, table, pages, num_blocks, tile + STAGES, k_low,
                        k_high, k_rotary, full, step + i + STAGES, BLOCK_SIZE, STAGES)  # fmt: skip
            step += count

            num_splits = (request_end - 1) // per_range - before // per_range + 1
            partial_index = 2 * gl.program_id(0) + (position > range_begin).to(gl.int32)
            if skipped == 0:
                # The CTA with a request's first tile tells the combine kernel how many splits
                # there are and where the first partial result is.
                header = (partial_index << 14) | (token * GROUP << 8) | num_splits
                gl.store(
                    split_headers + (start + token) * NUM_KV_HEADS + head_block,
                    header,
                    mask=valid & (row % GROUP == 0),
                )
            final_sum = gl.sum(row_sum, 1)
            finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
            acc_scale = gl.full([ROWS], 1.0, gl.float32, ROW)
            if HAS_SINK:
                if num_splits == 1:
                    # Otherwise the sink counts when the splits are combined (M4).
                    finite_max, acc_scale, final_sum = add_sink(
                        row_max, final_sum, gl.load(sinks + head, mask=valid, other=0.0)
                    )
            empty = final_sum == 0.0
            safe_sum = gl.where(empty, 1.0, final_sum)
            base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
            if num_splits == 1:
                if HAS_LSE:
                    gl.store(
                        lse + (start + token).to(gl.int64) * stride_lt + head,
                        base2 * LN2,
                        mask=valid,
                    )
            else:
                gl.store(partial_lses + partial_index * rows + row, base2, mask=valid)
            out_factor = gl.convert_layout(acc_scale / safe_sum, OUT_ROW)
            out_row = gl.arange(0, ROWS, OUT_ROW)
            out_token = out_row // GROUP
            out_valid = (out_row < TILE_TOKENS * GROUP) & (out_token < query_len)
            out_head = head_block * GROUP + out_row % GROUP
            offsets = (start + out_token).to(gl.int64) * stride_ot
            offsets += out_head.to(gl.int64) * stride_oh
            partial_offsets = (partial_index * rows + out_row).to(gl.int64) * DV
            _store_half(
                out, partials, acc_low, out_factor, offsets, partial_offsets, out_valid, num_splits,
                0)  # fmt: skip
            _store_half(
                out, partials, acc_high, out_factor, offsets, partial_offsets, out_valid,
                num_splits, HALF)  # fmt: skip
            position += count
        if position >= request_end:
            before = request_end
            request += 1
