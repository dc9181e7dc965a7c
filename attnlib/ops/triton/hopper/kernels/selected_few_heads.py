"""The Hopper kernel over selected latents for up to 16 query heads (M11, M12).

A CTA of four warps attends to the list of one query token, or to a split of it. It gathers a tile
of latents by `cp.async` and multiplies it in place (`latent_columns`); a part of the tile is
gathered again as soon as its last product is complete. Two CTAs of an SM overlap the gathers of
one with the products of the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.column_softmax import softmax_columns, store_weights
from attnlib.ops.triton.hopper.kernels.compat import partition_barrier
from attnlib.ops.triton.hopper.kernels.latent_columns import (
    COLUMNS,
    LATENTS,
    multiply_keys,
    multiply_values,
)
from attnlib.ops.triton.hopper.kernels.latent_tiles import gather_part, listed_positions
from attnlib.ops.triton.hopper.kernels.selected_latents import UNALIGNED, UNSPECIALIZED, token_list
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    add_sink,
    score_factor,
    transform_scores,
)
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["hopper_selected_few_heads_kernel"]


@gluon.jit
def _place(entries, table, slots, end, first, last, stride_kb, stride_kn, SELECT: gl.constexpr,
           BLOCK_SIZE: gl.constexpr):  # fmt: skip
    """Return (element offsets of the latents of key slots, whether they exist)."""
    position = listed_positions(entries, slots, end, first, last, SELECT)
    exists = position >= 0
    block = gl.load(table + gl.maximum(position, 0) // BLOCK_SIZE, mask=exists, other=0)
    offsets = block.to(gl.int64) * stride_kb
    offsets += (gl.maximum(position, 0) % BLOCK_SIZE).to(gl.int64) * stride_kn
    return offsets, exists


@gluon.jit
def _store_half(out, partials, result, staging, out_offset, stride_oh, place, num_splits,
                START: gl.constexpr, HEADS: gl.constexpr, DV: gl.constexpr,
                TO_OUT: gl.constexpr):  # fmt: skip
    """Write some elements of all heads: the output, else a partial result in float32."""
    if TO_OUT:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        target = staging.index(0).slice(0, 16, 0)
        target.store(gl.permute(result, (1, 0)).to(target.dtype))
        partition_barrier()
        head = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
        lanes = START + gl.arange(0, result.shape[0], gl.SliceLayout(0, LAYOUT))
        # The launcher checks 16-byte alignment; the shifts tell the compiler.
        offsets = ((out_offset + head.to(gl.int64) * stride_oh) >> 3) << 3
        gl.store(
            out + offsets[:, None] + lanes[None, :], target.load(LAYOUT),
            mask=(head < HEADS)[:, None] & (lanes >= 0)[None, :],
        )  # fmt: skip
    else:
        lanes = START + gl.arange(0, result.shape[0], gl.SliceLayout(1, COLUMNS))
        head = gl.arange(0, 16, gl.SliceLayout(0, COLUMNS))
        places = (place + head.to(gl.int64) * num_splits) * DV
        gl.store(
            partials + places[None, :] + lanes[:, None], result,
            mask=(head < HEADS)[None, :] & (lanes >= 0)[:, None],
        )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_selected_few_heads_kernel(
    query, key, out, partials, query_start_loc, seq_lens, block_table, indices, sinks, lse, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_heads, num_entries, num_splits,
    stride_lists, stride_table, stride_qt, stride_qh, stride_kb, stride_kn, stride_ot, stride_oh,
    stride_lt, SELECT: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, DV: gl.constexpr, ROTARY: gl.constexpr, SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """One CTA of 4 warps. Grid: (tokens, splits). Arguments as in `hopper_selected_latents_kernel`.

    Args:
        HEADS: query heads, at most 16.
        HEAD_BLOCKS: 1.
    """
    HALF: gl.constexpr = DV // 2
    DTYPE: gl.constexpr = query.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, HALF], DTYPE)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, ROTARY], DTYPE)
    Q_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, HALF], DTYPE)
    Q_NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, ROTARY], DTYPE)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, LATENTS], DTYPE)
    q_low = gl.allocate_shared_memory(DTYPE, [1, 16, HALF], Q_WIDE)
    q_high = gl.allocate_shared_memory(DTYPE, [1, 16, HALF], Q_WIDE)
    q_rotary = gl.allocate_shared_memory(DTYPE, [1, 16, ROTARY], Q_NARROW)
    k_low = gl.allocate_shared_memory(DTYPE, [1, LATENTS, HALF], WIDE)
    k_high = gl.allocate_shared_memory(DTYPE, [1, LATENTS, HALF], WIDE)
    k_rotary = gl.allocate_shared_memory(DTYPE, [1, LATENTS, ROTARY], NARROW)
    p_tile = gl.allocate_shared_memory(DTYPE, [1, 16, LATENTS], WEIGHTS)

    token = gl.program_id(0)
    split = gl.program_id(1)
    # Queries [16, elements] are copied like latents.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_rows = gl.arange(0, 16, gl.SliceLayout(1, COPY))
    q_offsets = token.to(gl.int64) * stride_qt + q_rows.to(gl.int64) * stride_qh
    gather_part(query, q_offsets, q_rows < HEADS, q_low.index(0), 0)
    gather_part(query, q_offsets, q_rows < HEADS, q_high.index(0), HALF)
    gather_part(query, q_offsets, q_rows < HEADS, q_rotary.index(0), DV)
    async_copy.commit_group()
    entries, table, exists, first, last, begin, end, has_holes = token_list(
        query_start_loc, seq_lens, block_table, indices, token, split, left, right, chunk, num_reqs,
        num_entries, num_splits, stride_lists, stride_table, LATENTS, SELECT, SPLIT, CAUSAL,
        HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    tiles = gl.maximum(end - begin + LATENTS - 1, 0) // LATENTS

    ROW: gl.constexpr = gl.SliceLayout(0, COLUMNS)
    factor = score_factor(scale, soft_cap, HAS_CAP)
    row_max = gl.full([16], float("-inf"), gl.float32, ROW)
    # Sums of the weights of each latent of a tile; added up at the end.
    sums = gl.zeros([LATENTS, 16], gl.float32, COLUMNS)
    acc_low = gl.zeros([HALF, 16], gl.float32, COLUMNS)
    acc_high = gl.zeros([HALF, 16], gl.float32, COLUMNS)
    slots = gl.arange(0, LATENTS, gl.SliceLayout(1, COLUMNS))
    rows = begin + gl.arange(0, LATENTS, gl.SliceLayout(1, COPY))
    offsets, found = _place(
        entries, table, rows, end, first, last, stride_kb, stride_kn, SELECT, BLOCK_SIZE
    )
    gather_part(key, offsets, found, k_low.index(0), 0)
    async_copy.commit_group()
    gather_part(key, offsets, found, k_high.index(0), HALF)
    gather_part(key, offsets, found, k_rotary.index(0), DV)
    async_copy.commit_group()
    for tile in range(tiles):
        # Places of the next tile, whose loads run beside the products.
        rows += LATENTS
        offsets, found = _place(
            entries, table, rows, end, first, last, stride_kb, stride_kn, SELECT, BLOCK_SIZE
        )
        async_copy.wait_group(1)
        # WGMMA reads shared memory through the async proxy: fence, then wait for all warps.
        fence_async_shared()
        partition_barrier()
        scores = gl.zeros([LATENTS, 16], gl.float32, COLUMNS)
        scores = multiply_keys(scores, k_low, q_low, False)
        async_copy.wait_group(0)
        fence_async_shared()
        partition_barrier()
        scores = multiply_keys(scores, k_high, q_high, True)
        scores = multiply_keys(scores, k_rotary, q_rotary, True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
        first_slot = begin + tile * LATENTS
        if has_holes:
            positions = listed_positions(
                entries, first_slot + slots, end, first, last, SELECT
            )
            scores = gl.where((positions >= 0)[:, None], scores, float("-inf"))
        else:
            if first_slot + LATENTS > end:
                scores = gl.where((first_slot + slots < end)[:, None], scores, float("-inf"))
        weights, acc_scale, row_max = softmax_columns(
            scores, factor, row_max, None, None, True, HAS_CAP
        )
        sums = sums * acc_scale[None, :] + weights
        acc_low = acc_low * acc_scale[None, :]
        acc_high = acc_high * acc_scale[None, :]
        store_weights(p_tile.index(0), weights, None, True, KV_PLAIN)
        acc_low = multiply_values(acc_low, k_low, p_tile)
        acc_high = multiply_values(acc_high, k_high, p_tile)
        acc_low = warpgroup_mma_wait(1, deps=[acc_low])
        # All warps are done with the lower half.
        partition_barrier()
        gather_part(key, offsets, found, k_low.index(0), 0)
        async_copy.commit_group()
        acc_high = warpgroup_mma_wait(0, deps=[acc_high])
        partition_barrier()
        gather_part(key, offsets, found, k_high.index(0), HALF)
        gather_part(key, offsets, found, k_rotary.index(0), DV)
        async_copy.commit_group()
    async_copy.wait_group(0)
    partition_barrier()

    row_sum = gl.sum(sums, 0)
    head = gl.arange(0, 16, ROW)
    valid = head < HEADS
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    out_scale = gl.full([16], 1.0, gl.float32, ROW)
    if HAS_SINK:
        if not SPLIT:
            # Otherwise the sink counts when the splits are combined (M4). Rows after the last
            # request see none.
            sink = gl.load(sinks + head, mask=valid & exists, other=float("-inf"))
            finite_max, out_scale, row_sum = add_sink(row_max, row_sum, sink)
    empty = row_sum == 0.0
    safe_sum = gl.where(empty, 1.0, row_sum)
    base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
    normalizer = (out_scale / safe_sum)[None, :]
    token64 = token.to(gl.int64)
    place = token64 * num_heads * num_splits + split
    if SPLIT:
        rows64 = num_tokens.to(gl.int64) * num_heads
        lses = partials + rows64 * num_splits * DV
        gl.store(lses + place + head * num_splits, base2, mask=valid)
        # Rows after the last request have no splits: the combine kernel leaves them alone.
        counts = lses + rows64 * num_splits + token64
        gl.store(counts, gl.where(exists, num_splits, 0).to(gl.float32))
        _store_half(
            out, partials, acc_low * normalizer, k_low, 0, stride_oh, place, num_splits, 0, HEADS,
            DV, False)  # fmt: skip
        _store_half(
            out, partials, acc_high * normalizer, k_high, 0, stride_oh, place, num_splits, HALF,
            HEADS, DV, False)  # fmt: skip
    if not SPLIT or (split == 0 and not exists):
        _store_half(
            out, partials, acc_low * normalizer, k_low, token64 * stride_ot, stride_oh, place,
            num_splits, 0, HEADS, DV, True)  # fmt: skip
        _store_half(
            out, partials, acc_high * normalizer, k_high, token64 * stride_ot, stride_oh, place,
            num_splits, HALF, HEADS, DV, True)  # fmt: skip
        if HAS_LSE:
            gl.store(lse + token64 * stride_lt + head, base2 * LN2, mask=valid)
