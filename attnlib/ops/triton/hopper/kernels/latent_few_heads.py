"""The Hopper decode kernel over latents for up to 16 query rows (P10, M12).

Work distribution, partial results and their combination are those of `decode`. A CTA of four warps
loads a tile of latents by TMA, in three parts, and multiplies it in place (`latent_columns`); a
part is loaded again as soon as its last product is complete. Two CTAs of an SM overlap the loads of
one with the products of the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.column_softmax import (
    mask_columns,
    softmax_columns,
    store_weights,
)
from attnlib.ops.triton.hopper.kernels.compat import (
    launch_dependent_grids,
    opaque_zero,
    partition_barrier,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode import (
    UNALIGNED,
    UNSPECIALIZED,
    clear_tile,
    num_key_tiles,
    tile_range,
)
from attnlib.ops.triton.hopper.kernels.latent_columns import (
    COLUMNS,
    LATENTS,
    multiply_keys,
    multiply_values,
)
from attnlib.ops.triton.hopper.kernels.latent_decode import (
    load_part,
    store_queries,
    tile_blocks,
)
from attnlib.ops.triton.hopper.kernels.schedule import visible_span, visited_tiles
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    add_sink,
    score_factor,
    transform_scores,
)
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["hopper_latent_few_heads_kernel"]


@gluon.jit
def _store_half(
    out, partials, result, offsets, partial_offsets, valid, num_splits, START: gl.constexpr
):
    """Write one half of the results [elements, rows]: the output of a single split, else a partial
    result."""
    lanes = START + gl.arange(0, result.shape[0], gl.SliceLayout(1, COLUMNS))
    mask = valid[None, :] & (lanes >= 0)[:, None]
    if num_splits == 1:
        gl.store(
            out + offsets[None, :] + lanes[:, None], result.to(out.dtype.element_ty), mask=mask
        )
    else:
        gl.store(partials + partial_offsets[None, :] + lanes[:, None], result, mask=mask)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_latent_few_heads_kernel(
    key_desc, value_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr, ROTARY: gl.constexpr,
    TILE_TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
    LEAST: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps. Grid: tile ranges. Arguments as in `hopper_latent_decode_kernel`.

    Args:
        ROWS: 16.
        NUM_KV_HEADS: 1.
        LEAST: tiles of a range, at least (`tile_range`).
    """
    HALF: gl.constexpr = DV // 2
    DTYPE: gl.constexpr = key_desc.dtype
    CHECK_FIRST: gl.constexpr = HAS_LEFT or HAS_CHUNK
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, HALF], DTYPE)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, ROTARY], DTYPE)
    Q_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], DTYPE)
    Q_NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROTARY], DTYPE)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, LATENTS], DTYPE)
    ROW: gl.constexpr = gl.SliceLayout(0, COLUMNS)
    Q_ROW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
    q_low = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], Q_WIDE)
    q_high = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], Q_WIDE)
    q_rotary = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROTARY], Q_NARROW)
    k_low = gl.allocate_shared_memory(DTYPE, [1, LATENTS, HALF], WIDE)
    k_high = gl.allocate_shared_memory(DTYPE, [1, LATENTS, HALF], WIDE)
    k_rotary = gl.allocate_shared_memory(DTYPE, [1, LATENTS, ROTARY], NARROW)
    p_tile = gl.allocate_shared_memory(DTYPE, [1, ROWS, LATENTS], WEIGHTS)
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(3):
        mbarrier.init(full.index(part), count=1)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()

    # PDL: the previous kernel may have written the queries, the cache or the lengths. The combine
    # kernel may start; it waits for this kernel's results by itself.
    wait_on_dependent_grids()
    launch_dependent_grids()
    range_begin, range_end, per_range, request, before = tile_range(
        query_start_loc, seq_lens, left, right, chunk, num_reqs, gl.program_id(0),
        gl.num_programs(0), None, None, LATENTS, CAUSAL, HAS_LEFT, HAS_RIGHT,
        HAS_CHUNK, 0, LEAST)  # fmt: skip
    factor = score_factor(scale, soft_cap, HAS_CAP)
    row = gl.arange(0, ROWS, ROW)
    token = row // GROUP
    head = row % GROUP
    q_row = gl.arange(0, ROWS, Q_ROW)
    position = range_begin
    step = 0
    while position < range_end:
        tiles = num_key_tiles(
            query_start_loc, seq_lens, request, True, left, right, chunk, None, None, LATENTS,
            CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        request_end = before + tiles
        if position < request_end:
            # One split: tiles [skipped, skipped + count) of the request.
            skipped = position - before
            count = gl.minimum(tiles - skipped, range_end - position)
            start = gl.load(query_start_loc + request)
            query_len = gl.load(query_start_loc + request + 1) - start
            seq_len = gl.load(seq_lens + request)
            first_tile, left_end, right_begin, _ = visited_tiles(
                0, query_len, seq_len, left, right, chunk, request, None, None, TILE_TOKENS,
                LATENTS, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            first_tile += skipped
            table = block_table + request.to(gl.int64) * stride_table
            pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
            blocks = tile_blocks(table, pages, num_blocks, first_tile, BLOCK_SIZE)
            inside = first_tile * LATENTS % BLOCK_SIZE
            # All warps are done with the tiles and queries of the split before.
            partition_barrier()
            load_part(value_desc, blocks, inside, k_low.index(0), full.index(0), 0)
            load_part(value_desc, blocks, inside, k_high.index(0), full.index(1), HALF)
            load_part(key_desc, blocks, inside, k_rotary.index(0), full.index(2), DV)
            q_offsets = (start + q_row // GROUP).to(gl.int64) * stride_qt
            q_offsets += (q_row % GROUP).to(gl.int64) * stride_qh
            # The launcher checks 16-byte alignment; the shifts tell the compiler.
            q_offsets = (q_offsets >> 3) << 3
            q_valid = (q_row < TILE_TOKENS * GROUP) & (q_row // GROUP < query_len)
            store_queries(q_low.index(0), query, q_offsets, q_valid, 0)
            store_queries(q_high.index(0), query, q_offsets, q_valid, HALF)
            store_queries(q_rotary.index(0), query, q_offsets, q_valid, DV)
            # WGMMA reads shared memory through the async proxy: fence, then wait for all warps.
            fence_async_shared()
            partition_barrier()

            row_first, row_last = visible_span(
                token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            # Sums of the weights of each latent of a tile; added up at the end.
            sums = gl.zeros([LATENTS, ROWS], gl.float32, COLUMNS)
            acc_low = gl.zeros([HALF, ROWS], gl.float32, COLUMNS)
            acc_high = gl.zeros([HALF, ROWS], gl.float32, COLUMNS)
            for i in range(0, count):
                tile = first_tile + i
                blocks = tile_blocks(table, pages, num_blocks, tile + 1, BLOCK_SIZE)
                inside = (tile + 1) * LATENTS % BLOCK_SIZE
                zero = opaque_zero()
                scores = gl.zeros([LATENTS, ROWS], gl.float32, COLUMNS)
                mbarrier.wait(full.index(0), step & 1)
                scores = multiply_keys(scores, k_low.index(zero), q_low.index(zero), False)
                mbarrier.wait(full.index(1), step & 1)
                scores = multiply_keys(scores, k_high.index(zero), q_high.index(zero), True)
                mbarrier.wait(full.index(2), step & 1)
                scores = multiply_keys(scores, k_rotary.index(zero), q_rotary.index(zero), True)
                scores = warpgroup_mma_wait(0, deps=[scores])
                # TMA fills whole pages past the end with zeros, but not the rest of the last page,
                # which may hold anything (P5).
                past_end = seq_len - tile * LATENTS
                if (past_end < LATENTS) & (seq_len % BLOCK_SIZE != 0):
                    clear_tile(k_low.index(0), past_end, 0)
                    clear_tile(k_high.index(0), past_end, 0)
                scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
                if (tile >= right_begin) | (tile < left_end):
                    scores = mask_columns(scores, row_first, row_last, tile * LATENTS, CHECK_FIRST)
                weights, acc_scale, row_max = softmax_columns(
                    scores, factor, row_max, None, None, True, HAS_CAP
                )
                sums = sums * acc_scale[None, :] + weights
                acc_low = acc_low * acc_scale[None, :]
                acc_high = acc_high * acc_scale[None, :]
                store_weights(p_tile.index(0), weights, None, True, KV_PLAIN)
                # All warps are done with the rotary part (`store_weights`).
                if i + 1 < count:
                    load_part(key_desc, blocks, inside, k_rotary.index(0), full.index(2), DV)
                zero = opaque_zero()
                acc_low = multiply_values(acc_low, k_low.index(zero), p_tile.index(zero))
                acc_high = multiply_values(acc_high, k_high.index(zero), p_tile.index(zero))
                acc_low = warpgroup_mma_wait(1, deps=[acc_low])
                partition_barrier()
                if i + 1 < count:
                    load_part(value_desc, blocks, inside, k_low.index(0), full.index(0), 0)
                acc_high = warpgroup_mma_wait(0, deps=[acc_high])
                partition_barrier()
                if i + 1 < count:
                    load_part(value_desc, blocks, inside, k_high.index(0), full.index(1), HALF)
                step += 1
            row_sum = gl.sum(sums, 0)

            num_splits = (request_end - 1) // per_range - before // per_range + 1
            partial_index = 2 * gl.program_id(0) + (position > range_begin).to(gl.int32)
            valid = (row < TILE_TOKENS * GROUP) & (token < query_len)
            if skipped == 0:
                # The CTA with a request's first tile tells the combine kernel how many splits
                # there are and where the first partial result is.
                header = (partial_index << 15) | (token * GROUP << 9) | num_splits
                gl.store(split_headers + start + token, header, mask=valid & (head == 0))
            finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
            out_scale = gl.full([ROWS], 1.0, gl.float32, ROW)
            if HAS_SINK:
                if num_splits == 1:
                    # Otherwise the sink counts when the splits are combined (M4).
                    finite_max, out_scale, row_sum = add_sink(
                        row_max, row_sum, gl.load(sinks + head, mask=valid, other=0.0)
                    )
            empty = row_sum == 0.0
            safe_sum = gl.where(empty, 1.0, row_sum)
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
            normalizer = (out_scale / safe_sum)[None, :]
            offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
            partial_offsets = (partial_index * rows + row).to(gl.int64) * DV
            _store_half(
                out, partials, acc_low * normalizer, offsets, partial_offsets, valid, num_splits, 0
            )
            _store_half(
                out, partials, acc_high * normalizer, offsets, partial_offsets, valid, num_splits,
                HALF)  # fmt: skip
            position += count
        if position >= request_end:
            before = request_end
            request += 1
