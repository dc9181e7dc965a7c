"""The Hopper kernel over selected latents for up to 16 query heads (M11, M12).

A CTA attends to the list of one query token, or to a split of it. Four warps gather tiles of
latents by `cp.async`, in quarters, and four warps multiply them in place (`latent_columns`). As
soon as the last product with a quarter is complete, another one takes its slot. Two CTAs of an SM
overlap the gathers of one with the products of the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.column_softmax import softmax_columns, store_weights
from attnlib.ops.triton.hopper.kernels.compat import (
    arrive_after_copies,
    opaque_zero,
    partition_barrier,
)
from attnlib.ops.triton.hopper.kernels.latent_columns import (
    COLUMNS,
    LATENTS,
    multiply_keys,
    multiply_values,
)
from attnlib.ops.triton.hopper.kernels.latent_tiles import gather_part, listed_positions
from attnlib.ops.triton.hopper.kernels.selected_latents import (
    UNALIGNED,
    UNSPECIALIZED,
    count_slots,
    token_list,
)
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    add_sink,
    score_factor,
    transform_scores,
)
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["hopper_selected_few_heads_kernel"]

QUARTERS: gl.constexpr = gl.constexpr(4)
"""Parts of the value elements of a tile, in which it is gathered. The rotary part comes last."""
SLOTS: gl.constexpr = gl.constexpr(5)
"""Quarters in shared memory: quarter q of tile t is in slot (4 * t + q) % 5, so that the first one
of the next tile is there while a tile is used."""


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
def _store_quarter(out, partials, result, staging, out_offset, stride_oh, place, num_splits,
                START: gl.constexpr, HEADS: gl.constexpr, DV: gl.constexpr,
                TO_OUT: gl.constexpr):  # fmt: skip
    """Write some elements of all heads: the output, else a partial result in float32."""
    if TO_OUT:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        target = staging.slice(0, 16, 0)
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


@gluon.jit
def _gather_tile(key, offsets, found, ring, k_rotary, full, empty, tile, WIDTH: gl.constexpr):
    """Copy one tile, each part as soon as its slot is free.

    Args:
        offsets, found: of the latents (`_place`).
        full: barriers of the copies: of the first quarter and the rotary part, of the second and
            third quarter, and of the last one.
        empty: barriers of the slots; the last one is that of the rotary part.
        tile: number of the tile.
    """
    for quarter in gl.static_range(QUARTERS):
        use = tile * QUARTERS + quarter
        slot = use % SLOTS
        mbarrier.wait(empty.index(slot), ((use // SLOTS) & 1) ^ 1)
        gather_part(key, offsets, found, ring.index(slot), quarter * WIDTH)
        if quarter == 0:
            mbarrier.wait(empty.index(SLOTS), (tile & 1) ^ 1)
            gather_part(key, offsets, found, k_rotary.index(0), QUARTERS * WIDTH)
            arrive_after_copies(full.index(0), increment_count=False)
        if quarter == 2:
            arrive_after_copies(full.index(1), increment_count=False)
        if quarter == 3:
            arrive_after_copies(full.index(2), increment_count=False)


@gluon.jit
def _gatherer(
    query, key, entries, table, token, exists, begin, limit, first, last, num_entries, stride_qt,
    stride_qh, stride_kb, stride_kn, q_tile, q_rotary, ring, k_rotary, q_full, full, empty,
    SELECT: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Copy the queries and all tiles into shared memory. Four warps."""
    WIDTH: gl.constexpr = ring.shape[2]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = begin + gl.arange(0, LATENTS, gl.SliceLayout(1, COPY))
    offsets, found = _place(
        entries, table, rows, limit, first, last, stride_kb, stride_kn, SELECT, BLOCK_SIZE
    )
    # Queries [16, elements] are copied like latents.
    q_rows = gl.arange(0, 16, gl.SliceLayout(1, COPY))
    q_offsets = token.to(gl.int64) * stride_qt + q_rows.to(gl.int64) * stride_qh
    for quarter in gl.static_range(QUARTERS):
        gather_part(query, q_offsets, q_rows < HEADS, q_tile.index(quarter), quarter * WIDTH)
    gather_part(query, q_offsets, q_rows < HEADS, q_rotary.index(0), QUARTERS * WIDTH)
    arrive_after_copies(q_full.index(0), increment_count=False)
    rows += LATENTS
    next_offsets, next_found = _place(
        entries, table, rows, limit, first, last, stride_kb, stride_kn, SELECT, BLOCK_SIZE
    )
    _gather_tile(key, offsets, found, ring, k_rotary, full, empty, 0, WIDTH)
    # The first tile is on its way before the list is examined.
    used, _ = count_slots(entries, num_entries, exists, first, last, SELECT)
    end = gl.minimum(limit, used)
    tiles = gl.maximum(end - begin + LATENTS - 1, 0) // LATENTS
    for tile in range(1, tiles):
        offsets = next_offsets
        found = next_found
        rows += LATENTS
        next_offsets, next_found = _place(
            entries, table, rows, limit, first, last, stride_kb, stride_kn, SELECT, BLOCK_SIZE
        )
        _gather_tile(key, offsets, found, ring, k_rotary, full, empty, tile, WIDTH)


@gluon.jit
def _consumer(
    out, partials, lse, sinks, entries, token, exists, begin, limit, first, last, num_entries,
    scale, soft_cap, num_tokens, num_heads, split, num_splits, stride_ot, stride_oh, stride_lt,
    q_tile, q_rotary, ring, k_rotary, p_tile, max_tile, q_full, full, empty, SELECT: gl.constexpr,
    HEADS: gl.constexpr, DV: gl.constexpr, SPLIT: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Compute and write the results of the CTA. Four warps."""
    WIDTH: gl.constexpr = DV // QUARTERS
    used, has_holes = count_slots(entries, num_entries, exists, first, last, SELECT)
    end = gl.minimum(limit, used)
    # A CTA without keys masks one tile of zeros, which is copied in any case.
    tiles = gl.maximum(gl.maximum(end - begin + LATENTS - 1, 0) // LATENTS, 1)
    mbarrier.wait(q_full.index(0), 0)
    fence_async_shared()
    ROW: gl.constexpr = gl.SliceLayout(0, COLUMNS)
    factor = score_factor(scale, soft_cap, HAS_CAP)
    row_max = gl.full([16], float("-inf"), gl.float32, ROW)
    # Sums of the weights of each latent of a tile; added up at the end.
    sums = gl.zeros([LATENTS, 16], gl.float32, COLUMNS)
    acc0 = gl.zeros([WIDTH, 16], gl.float32, COLUMNS)
    acc1 = gl.zeros([WIDTH, 16], gl.float32, COLUMNS)
    acc2 = gl.zeros([WIDTH, 16], gl.float32, COLUMNS)
    acc3 = gl.zeros([WIDTH, 16], gl.float32, COLUMNS)
    slots = gl.arange(0, LATENTS, gl.SliceLayout(1, COLUMNS))
    for tile in range(tiles):
        use = tile * QUARTERS
        slot0 = use % SLOTS
        slot1 = (use + 1) % SLOTS
        slot2 = (use + 2) % SLOTS
        slot3 = (use + 3) % SLOTS
        scores = gl.zeros([LATENTS, 16], gl.float32, COLUMNS)
        mbarrier.wait(full.index(0), tile & 1)
        # Written by `cp.async`; WGMMA reads shared memory through the async proxy.
        fence_async_shared()
        zero = opaque_zero()
        scores = multiply_keys(scores, ring.index(slot0), q_tile.index(0), False)
        scores = multiply_keys(scores, k_rotary.index(zero), q_rotary.index(zero), True)
        mbarrier.wait(full.index(1), tile & 1)
        fence_async_shared()
        scores = multiply_keys(scores, ring.index(slot1), q_tile.index(1), True)
        scores = multiply_keys(scores, ring.index(slot2), q_tile.index(2), True)
        mbarrier.wait(full.index(2), tile & 1)
        fence_async_shared()
        scores = multiply_keys(scores, ring.index(slot3), q_tile.index(3), True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(empty.index(SLOTS), count=1)
        scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
        first_slot = begin + tile * LATENTS
        if has_holes:
            positions = listed_positions(entries, first_slot + slots, end, first, last, SELECT)
            scores = gl.where((positions >= 0)[:, None], scores, float("-inf"))
        else:
            if first_slot + LATENTS > end:
                scores = gl.where((first_slot + slots < end)[:, None], scores, float("-inf"))
        weights, acc_scale, row_max = softmax_columns(
            scores, factor, row_max, None, None, True, HAS_CAP, max_tile
        )
        sums = sums * acc_scale[None, :] + weights
        acc0 = acc0 * acc_scale[None, :]
        acc1 = acc1 * acc_scale[None, :]
        acc2 = acc2 * acc_scale[None, :]
        acc3 = acc3 * acc_scale[None, :]
        store_weights(p_tile.index(0), weights, None, True, KV_PLAIN)
        weights_tile = p_tile.index(opaque_zero())
        acc0 = multiply_values(acc0, ring.index(slot0), weights_tile)
        acc1 = multiply_values(acc1, ring.index(slot1), weights_tile)
        acc2 = multiply_values(acc2, ring.index(slot2), weights_tile)
        acc3 = multiply_values(acc3, ring.index(slot3), weights_tile)
        acc0 = warpgroup_mma_wait(3, deps=[acc0])
        mbarrier.arrive(empty.index(slot0), count=1)
        acc1 = warpgroup_mma_wait(2, deps=[acc1])
        mbarrier.arrive(empty.index(slot1), count=1)
        acc2 = warpgroup_mma_wait(1, deps=[acc2])
        mbarrier.arrive(empty.index(slot2), count=1)
        acc3 = warpgroup_mma_wait(0, deps=[acc3])
        mbarrier.arrive(empty.index(slot3), count=1)
    # All warps are done with the slots, which hold the output from now on.
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
    empty_rows = row_sum == 0.0
    safe_sum = gl.where(empty_rows, 1.0, row_sum)
    base2 = gl.where(empty_rows, float("-inf"), finite_max + gl.log2(safe_sum))
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
        for quarter in gl.static_range(QUARTERS):
            _store_quarter(
                out, partials, (acc0, acc1, acc2, acc3)[quarter] * normalizer, ring.index(quarter),
                0, stride_oh, place, num_splits, quarter * WIDTH, HEADS, DV, False)  # fmt: skip
    if not SPLIT or (split == 0 and not exists):
        for quarter in gl.static_range(QUARTERS):
            _store_quarter(
                out, partials, (acc0, acc1, acc2, acc3)[quarter] * normalizer, ring.index(quarter),
                token64 * stride_ot, stride_oh, place, num_splits, quarter * WIDTH, HEADS, DV,
                True)  # fmt: skip
        if HAS_LSE:
            gl.store(lse + token64 * stride_lt + head, base2 * LN2, mask=valid)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_selected_few_heads_kernel(
    query, key, out, partials, query_start_loc, seq_lens, block_table, indices, sinks, lse, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_heads, num_entries, num_splits,
    stride_lists, stride_table, stride_qt, stride_qh, stride_kb, stride_kn, stride_ot, stride_oh,
    stride_lt, SELECT: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, DV: gl.constexpr, ROTARY: gl.constexpr, SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
    GATHERER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One CTA of 8 warps. Grid: (tokens, splits). Arguments as in `hopper_selected_latents_kernel`.

    Args:
        HEADS: query heads, at most 16.
        HEAD_BLOCKS: 1.
        GATHERER_REGISTERS: registers of a thread that gathers.
    """
    WIDTH: gl.constexpr = DV // QUARTERS
    DTYPE: gl.constexpr = query.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, WIDTH], DTYPE)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LATENTS, ROTARY], DTYPE)
    Q_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, WIDTH], DTYPE)
    Q_NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, ROTARY], DTYPE)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, LATENTS], DTYPE)
    q_tile = gl.allocate_shared_memory(DTYPE, [QUARTERS, 16, WIDTH], Q_WIDE)
    q_rotary = gl.allocate_shared_memory(DTYPE, [1, 16, ROTARY], Q_NARROW)
    ring = gl.allocate_shared_memory(DTYPE, [SLOTS, LATENTS, WIDTH], WIDE)
    k_rotary = gl.allocate_shared_memory(DTYPE, [1, LATENTS, ROTARY], NARROW)
    p_tile = gl.allocate_shared_memory(DTYPE, [1, 16, LATENTS], WEIGHTS)
    max_tile = gl.allocate_shared_memory(
        gl.float32, [4, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS + 1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=128)
    for slot in gl.static_range(SLOTS + 1):
        mbarrier.init(empty.index(slot), count=1)
    for copy in gl.static_range(3):
        mbarrier.init(full.index(copy), count=128)
    fence_async_shared()

    token = gl.program_id(0)
    split = gl.program_id(1)
    entries, table, exists, first, last, begin, limit = token_list(
        query_start_loc, seq_lens, block_table, indices, token, split, left, right, chunk, num_reqs,
        num_entries, num_splits, stride_lists, stride_table, LATENTS, SELECT, SPLIT, CAUSAL,
        HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (
                out, partials, lse, sinks, entries, token, exists, begin, limit, first, last,
                num_entries, scale, soft_cap, num_tokens, num_heads, split, num_splits, stride_ot,
                stride_oh, stride_lt, q_tile, q_rotary, ring, k_rotary, p_tile, max_tile, q_full,
                full, empty, SELECT, HEADS, DV, SPLIT, HAS_CAP, HAS_SINK, HAS_LSE)),
            (_gatherer, (
                query, key, entries, table, token, exists, begin, limit, first, last, num_entries,
                stride_qt, stride_qh, stride_kb, stride_kn, q_tile, q_rotary, ring, k_rotary,
                q_full, full, empty, SELECT, BLOCK_SIZE, HEADS)),
        ],
        [4],
        [GATHERER_REGISTERS],
    )  # fmt: skip
