"""The Hopper kernel over selected latents (M11, M12): a CTA computes up to 64 heads of one token.

One CTA per (query token, block of heads, split of the list); the slots of a list are numbered as in
`ops.triton.kernels.selected`, whose combine kernel and workspace it shares. Consumers read the
list for their masks, so that only copied latents pass through shared memory; only lists with
entries that select nothing between others need it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import arrive_after_copies
from attnlib.ops.triton.hopper.kernels.latent_tiles import (
    HIGH,
    LOW,
    PARTS,
    ROTARY_PART,
    TILE,
    attend_both,
    attend_other,
    attend_own,
    gather_part,
    listed_positions,
    store_partial,
    store_rows,
    total_sum,
)
from attnlib.ops.triton.hopper.kernels.schedule import visible_span
from attnlib.ops.triton.hopper.kernels.softmax import LN2, add_sink, score_factor

__all__ = [
    "UNALIGNED",
    "UNSPECIALIZED",
    "count_slots",
    "hopper_selected_latents_kernel",
    "list_slots",
    "visible_keys",
]

UNSPECIALIZED = [
    "left", "right", "chunk", "num_reqs", "num_tokens", "num_heads", "num_entries", "num_splits",
    "stride_lists", "stride_table", "stride_qt", "stride_qh", "stride_kb", "stride_kn",
    "stride_ot", "stride_oh", "stride_lt",
]  # fmt: skip
UNALIGNED = ["query_start_loc", "seq_lens", "block_table", "indices", "sinks", "lse"]


@gluon.jit
def count_slots(entries, num_entries, exists, first, last, SELECT: gl.constexpr):
    """Return the slots up to the last entry with a position in [first, last), and whether there is
    a slot before it without one."""
    LANES: gl.constexpr = 2048
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    low = first // SELECT
    high = (last + SELECT - 1) // SELECT
    furthest = gl.zeros([LANES], gl.int32, layout)
    complete = gl.zeros([LANES], gl.int32, layout)
    # Tokens after the last request have no list.
    num_entries = gl.where(exists, num_entries, 0)
    for base in range(0, num_entries, LANES):
        lanes = base + gl.arange(0, LANES, layout)
        entry = gl.load(entries + lanes, mask=lanes < num_entries, other=-1)
        used = (entry >= 0) & (entry >= low) & (entry < high)
        furthest = gl.maximum(furthest, gl.where(used, lanes + 1, 0))
        if SELECT == 1:
            complete += used.to(gl.int32)
        else:
            inside = (entry >= 0) & (entry >= (first + SELECT - 1) // SELECT)
            complete += (inside & (entry < last // SELECT)).to(gl.int32)
    count = gl.max(furthest, 0)
    return count * SELECT, gl.sum(complete, 0) < count


@gluon.jit
def list_slots(
    indices, token, split, num_entries, num_splits, stride_lists, STEP: gl.constexpr,
    SELECT: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Return (list of a token, [begin, end) of the CTA's slots).

    Args:
        STEP: slots of a step of the CTA; splits begin at multiples of it.
    """
    entries = indices + token.to(gl.int64) * stride_lists
    begin = 0
    end = num_entries * SELECT
    if SPLIT:
        # The same splits for all lists, because the combine kernel knows one number per token.
        steps = (num_entries * SELECT + STEP - 1) // STEP
        per_split = (steps + num_splits - 1) // num_splits
        begin = split * per_split * STEP
        end = gl.minimum(end, begin + per_split * STEP)
    return entries, begin, end


@gluon.jit
def visible_keys(
    query_start_loc, seq_lens, block_table, token, left, right, chunk, num_reqs, stride_table,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
):  # fmt: skip
    """Return (block table of a token's request, whether there is a request, [first, last) of the
    visible positions)."""
    REQUESTS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    request = 0
    for base in range(1, num_reqs + 1, 128):
        lanes = base + gl.arange(0, 128, REQUESTS)
        inside = lanes <= num_reqs
        starts = gl.load(query_start_loc + lanes, mask=inside, other=0)
        request += gl.sum((inside & (starts <= token)).to(gl.int32), 0)
    # Tokens after the last request have no keys: their rows become 0 (M6).
    exists = request < num_reqs
    start = gl.load(query_start_loc + request)
    query_len = gl.load(query_start_loc + request + 1, mask=exists, other=0) - start
    seq_len = gl.load(seq_lens + request, mask=exists, other=0)
    first, last = visible_span(
        seq_len - query_len + token - start, seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
        HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    table = block_table + request.to(gl.int64) * stride_table
    return table, exists, gl.maximum(first, 0), gl.where(exists, last, 0)


@gluon.jit
def _gatherer(
    query, key, entries, table, token, head_offset, begin, end, first, last, pairs, stride_qt,
    stride_qh, stride_kb, stride_kn, q_low, q_high, q_rotary, k_low, k_high, k_rotary, q_full,
    k_full, k_empty, SELECT: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Copy the queries and all pairs of tiles into shared memory. One warpgroup."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    heads = (head_offset + rows).to(gl.int64)
    HALF: gl.constexpr = q_low.shape[2]
    query_offsets = token.to(gl.int64) * stride_qt + heads * stride_qh
    gather_part(query, query_offsets, rows < HEADS, q_rotary.index(0), 2 * HALF)
    gather_part(query, query_offsets, rows < HEADS, q_low.index(0), 0)
    gather_part(query, query_offsets, rows < HEADS, q_high.index(0), HALF)
    arrive_after_copies(q_full.index(0), increment_count=False)
    # Positions and blocks are loaded one tile ahead.
    position = listed_positions(entries, begin + rows, end, first, last, SELECT)
    block = gl.load(table + gl.maximum(position, 0) // BLOCK_SIZE, mask=position >= 0, other=0)
    for pair in range(pairs):
        for tile in gl.static_range(2):
            slots = begin + (2 * pair + tile + 1) * TILE + rows
            next_position = listed_positions(entries, slots, end, first, last, SELECT)
            next_block = gl.load(
                table + gl.maximum(next_position, 0) // BLOCK_SIZE, mask=next_position >= 0, other=0
            )
            offsets = block.to(gl.int64) * stride_kb
            offsets += (gl.maximum(position, 0) % BLOCK_SIZE).to(gl.int64) * stride_kn
            exists = position >= 0
            # The parity is inverted, so that the first use of each buffer does not wait.
            mbarrier.wait(k_empty.index(tile * PARTS + ROTARY_PART), (pair & 1) ^ 1)
            gather_part(key, offsets, exists, k_rotary.index(tile), 2 * HALF)
            arrive_after_copies(k_full.index(tile * PARTS + ROTARY_PART), increment_count=False)
            if tile == 0:
                mbarrier.wait(k_empty.index(tile * PARTS + LOW), (pair & 1) ^ 1)
                gather_part(key, offsets, exists, k_low.index(tile), 0)
                arrive_after_copies(k_full.index(tile * PARTS + LOW), increment_count=False)
                mbarrier.wait(k_empty.index(tile * PARTS + HIGH), (pair & 1) ^ 1)
                gather_part(key, offsets, exists, k_high.index(tile), HALF)
                arrive_after_copies(k_full.index(tile * PARTS + HIGH), increment_count=False)
            else:
                mbarrier.wait(k_empty.index(tile * PARTS + HIGH), (pair & 1) ^ 1)
                gather_part(key, offsets, exists, k_high.index(tile), HALF)
                arrive_after_copies(k_full.index(tile * PARTS + HIGH), increment_count=False)
                mbarrier.wait(k_empty.index(tile * PARTS + LOW), (pair & 1) ^ 1)
                gather_part(key, offsets, exists, k_low.index(tile), 0)
                arrive_after_copies(k_full.index(tile * PARTS + LOW), increment_count=False)
            position = next_position
            block = next_block


@gluon.jit
def _consumer(
    out, partials, lse, sinks, entries, token, head_offset, exists, begin, end, has_holes,
    first, last, pairs, scale, soft_cap, num_tokens, num_heads, split, num_splits, stride_ot,
    stride_oh, stride_lt, q_low, q_high, q_rotary, k_low, k_high, k_rotary, p_tile, maxima, scales,
    sums, q_full, k_full, k_empty, p_ready, summed, CONSUMER: gl.constexpr, SELECT: gl.constexpr,
    HEADS: gl.constexpr, DV: gl.constexpr, SPLIT: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINK:
    gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Compute one half of the value elements."""
    HALF: gl.constexpr = DV // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    factor = score_factor(scale, soft_cap, HAS_CAP)
    row_max = gl.full([64], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([64], gl.float32, ROW)
    acc = gl.zeros([64, HALF], gl.float32, VALUES)
    columns = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    # Wait for the copies of the queries, which WGMMA reads through the async proxy.
    mbarrier.wait(q_full.index(0), 0)
    fence_async_shared()
    if CONSUMER == 0:
        if pairs > 0:
            keys = (entries, begin, begin + columns, end, first, last, has_holes)
            acc, row_max, row_sum = attend_own(
                acc, row_max, row_sum, keys, 0, q_low, q_high, q_rotary, k_low, k_high, k_rotary,
                p_tile, maxima, scales, k_full, k_empty, p_ready, factor, soft_cap, CONSUMER,
                HAS_CAP, SELECT)  # fmt: skip
    # Consumer 0 attends to a tile A together with the tile B before it.
    for pair in range(1 - CONSUMER, pairs):
        slot = begin + (2 * pair + CONSUMER) * TILE
        keys = (entries, slot, slot + columns, end, first, last, has_holes)
        acc, row_max, row_sum = attend_both(
            acc, row_max, row_sum, keys, pair & 1, (pair + CONSUMER + 1) & 1, q_low, q_high,
            q_rotary, k_low, k_high, k_rotary, p_tile, maxima, scales, k_full, k_empty, p_ready,
            factor, soft_cap, CONSUMER, HAS_CAP, SELECT, True)  # fmt: skip
    if CONSUMER == 0:
        if pairs > 0:
            acc, row_max, row_sum = attend_other(
                acc, row_max, row_sum, (pairs - 1) & 1, k_low, k_high, p_tile, maxima, scales,
                k_empty, p_ready, CONSUMER, SELECT)  # fmt: skip
    row_sum = total_sum(row_sum, sums, summed, 0, CONSUMER)

    head = head_offset + gl.arange(0, 64, ROW)
    valid = gl.arange(0, 64, ROW) < HEADS
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    acc_scale = gl.full([64], 1.0, gl.float32, ROW)
    if HAS_SINK:
        if not SPLIT:
            # Otherwise the sink counts when the splits are combined (M4). Rows after the last
            # request see none.
            sink = gl.load(sinks + head, mask=valid & exists, other=float("-inf"))
            finite_max, acc_scale, row_sum = add_sink(row_max, row_sum, sink)
    empty = row_sum == 0.0
    safe_sum = gl.where(empty, 1.0, row_sum)
    base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
    out_factor = gl.convert_layout(acc_scale / safe_sum, gl.SliceLayout(1, VALUES))
    result = acc * out_factor[:, None]
    token64 = token.to(gl.int64)
    if SPLIT:
        rows64 = num_tokens.to(gl.int64) * num_heads
        lses = partials + rows64 * num_splits * DV
        if CONSUMER == 0:
            place = (token64 * num_heads + head) * num_splits + split
            gl.store(lses + place, base2, mask=valid)
            # Rows after the last request have no splits: the combine kernel leaves them alone.
            counts = lses + rows64 * num_splits + token64
            gl.store(counts, gl.where(exists, num_splits, 0).to(gl.float32))
        store_partial(
            partials, result, (token64 * num_heads + head_offset) * num_splits + split, num_splits,
            HEADS, DV, CONSUMER)  # fmt: skip
    if not SPLIT or (split == 0 and not exists):
        if CONSUMER == 0:
            staging = k_low.index(0)
        else:
            staging = k_high.index(0)
        # No product reads this buffer any more.
        store_rows(
            out, result, token64 * stride_ot + head_offset.to(gl.int64) * stride_oh, stride_oh,
            staging, HEADS, CONSUMER)  # fmt: skip
        if HAS_LSE:
            if CONSUMER == 0:
                gl.store(lse + token64 * stride_lt + head, base2 * LN2, mask=valid)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_selected_latents_kernel(
    query, key, out, partials, query_start_loc, seq_lens, block_table, indices, sinks, lse, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_heads, num_entries, num_splits,
    stride_lists, stride_table, stride_qt, stride_qh, stride_kb, stride_kn, stride_ot, stride_oh,
    stride_lt, SELECT: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, DV: gl.constexpr, ROTARY: gl.constexpr, SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One CTA of 12 warps. Grid: (tokens * HEAD_BLOCKS, splits).

    Args:
        partials: float32 partial results as in `ops.triton.kernels.decode`, not used without SPLIT.
        indices: the lists, [tokens, ..., entries].
        num_entries: entries of a list.
        num_splits: splits of each list.
        SELECT: positions of an entry.
        HEADS: query heads of a block, at most 64.
    """
    HALF: gl.constexpr = DV // 2
    DTYPE: gl.constexpr = query.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HALF], DTYPE)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROTARY], DTYPE)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, TILE], DTYPE)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_low = gl.allocate_shared_memory(DTYPE, [1, 64, HALF], WIDE)
    q_high = gl.allocate_shared_memory(DTYPE, [1, 64, HALF], WIDE)
    q_rotary = gl.allocate_shared_memory(DTYPE, [1, 64, ROTARY], NARROW)
    k_low = gl.allocate_shared_memory(DTYPE, [2, TILE, HALF], WIDE)
    k_high = gl.allocate_shared_memory(DTYPE, [2, TILE, HALF], WIDE)
    k_rotary = gl.allocate_shared_memory(DTYPE, [2, TILE, ROTARY], NARROW)
    p_tile = gl.allocate_shared_memory(DTYPE, [64, TILE], WEIGHTS)
    maxima = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    scales = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], mbarrier.MBarrierLayout())
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=128)
    for part in gl.static_range(2 * PARTS):
        mbarrier.init(k_full.index(part), count=128)
        mbarrier.init(k_empty.index(part), count=1)
    for tile in gl.static_range(2):
        mbarrier.init(p_ready.index(tile), count=1)
        mbarrier.init(summed.index(tile), count=1)
    fence_async_shared()

    token = gl.program_id(0) // HEAD_BLOCKS
    head_offset = gl.program_id(0) % HEAD_BLOCKS * HEADS
    split = gl.program_id(1)
    table, exists, first, last = visible_keys(
        query_start_loc, seq_lens, block_table, token, left, right, chunk, num_reqs, stride_table,
        CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    entries, begin, end = list_slots(
        indices, token, split, num_entries, num_splits, stride_lists, 2 * TILE, SELECT, SPLIT
    )
    used, has_holes = count_slots(entries, num_entries, exists, first, last, SELECT)
    end = gl.minimum(end, used)
    pairs = gl.maximum(end - begin + 2 * TILE - 1, 0) // (2 * TILE)
    gl.warp_specialize(
        [
            (_gatherer, (
                query, key, entries, table, token, head_offset, begin, end, first, last, pairs,
                stride_qt, stride_qh, stride_kb, stride_kn, q_low, q_high, q_rotary, k_low, k_high,
                k_rotary, q_full, k_full, k_empty, SELECT, BLOCK_SIZE, HEADS)),
            (_consumer, (
                out, partials, lse, sinks, entries, token, head_offset, exists, begin, end,
                has_holes, first, last, pairs, scale, soft_cap, num_tokens, num_heads, split,
                num_splits, stride_ot, stride_oh, stride_lt, q_low, q_high, q_rotary, k_low, k_high,
                k_rotary, p_tile, maxima, scales, sums, q_full, k_full, k_empty, p_ready, summed, 0,
                SELECT, HEADS, DV, SPLIT, HAS_CAP, HAS_SINK, HAS_LSE)),
            (_consumer, (
                out, partials, lse, sinks, entries, token, head_offset, exists, begin, end,
                has_holes, first, last, pairs, scale, soft_cap, num_tokens, num_heads, split,
                num_splits, stride_ot, stride_oh, stride_lt, q_low, q_high, q_rotary, k_low, k_high,
                k_rotary, p_tile, maxima, scales, sums, q_full, k_full, k_empty, p_ready, summed, 1,
                SELECT, HEADS, DV, SPLIT, HAS_CAP, HAS_SINK, HAS_LSE)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )  # fmt: skip
