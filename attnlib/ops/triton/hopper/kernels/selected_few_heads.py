"""The Hopper kernel over selected latents for up to 16 query heads (M11, M12).

A CTA attends to the list of one query token, or to a split of it. Four warps gather tiles of
latents by `cp.async`, in quarters, and four warps multiply them (`latent_columns`). Two CTAs of an
SM overlap the gathers of one with the products of the other.

The slots limit how much is in flight. So the warps that multiply load the first quarter into
registers while they wait for the others: half of the next tile can be gathered during the softmax
and the products with the values. Slots are released together and not one by one, because each wait
and each arrival synchronizes the warps of a partition.

Many lists take two launches. In the first, weights are relative to the maxima of the first tile and
not to running maxima: the warps that multiply then exchange no maxima for the other tiles, and
nothing is rescaled. The largest weight of a row is no longer 1, and is rounded. Outputs are
therefore divided by the sum of the rounded weights: the error of a weight that outweighs the others
cancels. The warps that gather add them up.

Where the scores rise so far above the maxima of the first tile that a sum of weights becomes too
large, and where entries that select nothing come before others, the output becomes NaN. The second
launch attends to the lists with such outputs, with running maxima.
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
    exp2,
    opaque_zero,
    partition_barrier,
)
from attnlib.ops.triton.hopper.kernels.latent_columns import (
    COLUMNS,
    LATENTS,
    load_values,
    multiply_keys,
    multiply_loaded_values,
    multiply_values,
)
from attnlib.ops.triton.hopper.kernels.latent_tiles import (
    entry_positions,
    gather_part,
    listed_positions,
    load_entries,
)
from attnlib.ops.triton.hopper.kernels.selected_latents import (
    UNALIGNED,
    UNSPECIALIZED,
    count_slots,
    list_slots,
    visible_keys,
)
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    add_sink,
    score_factor,
    transform_scores,
)
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["hopper_selected_few_heads_kernel"]

ONE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Layout of a number in shared memory."""
QUARTERS: gl.constexpr = gl.constexpr(4)
"""Parts of the value elements of a tile, in which it is gathered. The rotary part comes last."""
SLOTS: gl.constexpr = gl.constexpr(5)
"""Quarters in shared memory: quarter q of tile t is in slot (4 * t + q) % 5, so that the first one
of the next tile is there while a tile is used."""
LARGEST_SUM: gl.constexpr = gl.constexpr(2.0**40)
"""Sum of the weights of a row above which its list is left to the second launch. A sum of weights
times values overflows only with values above 2^87."""
LARGEST_SUM_FLOAT16: gl.constexpr = gl.constexpr(2.0**15)
"""The same for weights in float16, which must stay below 65504."""
FRONT: gl.constexpr = gl.constexpr(0)
BACK: gl.constexpr = gl.constexpr(1)
"""Barriers of a tile (`_gather_tile`)."""


@gluon.jit
def _load_blocks(table, position, BLOCK_SIZE: gl.constexpr):
    """Return the blocks of positions; 0 for -1."""
    return gl.load(table + gl.maximum(position, 0) // BLOCK_SIZE, mask=position >= 0, other=0)


@gluon.jit
def _offsets(position, block, stride_kb, stride_kn, BLOCK_SIZE: gl.constexpr):
    """Return the element offsets of the latents of positions."""
    offsets = block.to(gl.int64) * stride_kb
    offsets += (gl.maximum(position, 0) % BLOCK_SIZE).to(gl.int64) * stride_kn
    return offsets


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
def _holds_nan(out, token, stride_ot, stride_oh, HEADS: gl.constexpr):
    """Whether the first element of an output of a token is NaN."""
    head = gl.arange(0, 16, gl.BlockedLayout([1], [32], [4], [0]))
    first = gl.load(
        out + token.to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh, mask=head < HEADS,
        other=0.0,
    ).to(gl.float32)  # fmt: skip
    return gl.max((first != first).to(gl.int32), 0) != 0


@gluon.jit
def _any_holds_nan(out, num_tokens, stride_ot, stride_oh, HEADS: gl.constexpr):
    """`_holds_nan` of any token of the CTA."""
    TOKENS: gl.constexpr = 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    heads = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
    found = gl.zeros([TOKENS, 16], gl.int32, LAYOUT)
    for base in range(gl.program_id(0), num_tokens, TOKENS * gl.num_programs(0)):
        tokens = base + gl.num_programs(0) * gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
        offsets = tokens.to(gl.int64)[:, None] * stride_ot + heads.to(gl.int64)[None, :] * stride_oh
        first = gl.load(
            out + offsets, mask=(tokens < num_tokens)[:, None] & (heads < HEADS)[None, :], other=0.0
        ).to(gl.float32)
        found |= (first != first).to(gl.int32)
    return gl.max(gl.max(found, 1), 0) != 0


@gluon.jit
def _tokens(repeated_tokens, REPEAT: gl.constexpr):
    """Return (end, step) of the CTA's tokens from its number on."""
    if REPEAT:
        return repeated_tokens, gl.num_programs(0)
    else:
        return gl.program_id(0) + 1, 1


@gluon.jit
def _gather_tile(
    key, offsets, found, ring, k_rotary, p_tile, sums, full, empty, tile, done,
    RUNNING: gl.constexpr,
):  # fmt: skip
    """Copy one tile, each part as soon as its slot is free.

    Args:
        offsets, found: of the latents (`_offsets`), and whether they exist.
        sums: of the rounded weights up to tile - 2, unless RUNNING.
        full: barriers of the copies: of the first two quarters and the rotary part (FRONT), and of
            the others (BACK).
        empty: barriers of the free slots: of the first quarter and the rotary part (FRONT), and of
            the others (BACK).
        tile: number of the tile in its list, whose first one finds all slots free.
        done: tiles of the lists before.

    Returns:
        The sums up to tile - 1.
    """
    WIDTH: gl.constexpr = ring.shape[2]
    use = tile * QUARTERS
    phase = ((done + tile) & 1) ^ 1
    # Its slot held a quarter of the tile before the last one, which has been released.
    gather_part(key, offsets, found, ring.index(use % SLOTS), 0)
    mbarrier.wait(empty.index(FRONT), phase)
    gather_part(key, offsets, found, k_rotary.index(0), QUARTERS * WIDTH)
    gather_part(key, offsets, found, ring.index((use + 1) % SLOTS), WIDTH)
    arrive_after_copies(full.index(FRONT), increment_count=False)
    mbarrier.wait(empty.index(BACK), phase)
    if not RUNNING:
        if tile > 0:
            # The warps that multiply store other weights only after the copies below.
            sums = _add_weights(sums, p_tile)
    gather_part(key, offsets, found, ring.index((use + 2) % SLOTS), 2 * WIDTH)
    gather_part(key, offsets, found, ring.index((use + 3) % SLOTS), 3 * WIDTH)
    arrive_after_copies(full.index(BACK), increment_count=False)
    return sums


@gluon.jit
def _add_weights(sums, p_tile):
    """Add the weights of a tile, [16, 64], to their sums."""
    return sums + p_tile.index(0).load(sums.type.layout).to(gl.float32)


@gluon.jit
def _gather_list(
    query, key, query_start_loc, seq_lens, block_table, indices, left, right, chunk, num_reqs,
    num_entries, num_splits, stride_lists, stride_table, stride_qt, stride_qh, stride_kb, stride_kn,
    token, number, done, q_tile, q_rotary, ring, k_rotary, p_tile, rounded_sums, summed, num_tiles,
    listed, q_full, q_empty, full, empty, SELECT: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HEADS: gl.constexpr, SPLIT: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, RUNNING: gl.constexpr,
):  # fmt: skip
    """Copy the queries of a token and all tiles of its list; returns the number of tiles.

    Args:
        number, done: lists and tiles that the CTA has attended to before.
        rounded_sums: [16] in shared memory, for the sums of the rounded weights unless RUNNING.
        summed: barrier of these sums.
    """
    WIDTH: gl.constexpr = ring.shape[2]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    entries, begin, limit = list_slots(
        indices, token, gl.program_id(1), num_entries, num_splits, stride_lists, LATENTS, SELECT,
        SPLIT)  # fmt: skip
    rows = begin + gl.arange(0, LATENTS, gl.SliceLayout(1, COPY))
    entry = load_entries(entries, rows, limit, SELECT)
    next_entry = load_entries(entries, rows + LATENTS, limit, SELECT)
    # Queries [16, elements] are copied like latents, to where the output before was staged.
    q_rows = gl.arange(0, 16, gl.SliceLayout(1, COPY))
    q_offsets = token.to(gl.int64) * stride_qt + q_rows.to(gl.int64) * stride_qh
    mbarrier.wait(q_empty.index(0), (number & 1) ^ 1)
    for quarter in gl.static_range(QUARTERS):
        gather_part(query, q_offsets, q_rows < HEADS, q_tile.index(quarter), quarter * WIDTH)
    gather_part(query, q_offsets, q_rows < HEADS, q_rotary.index(0), QUARTERS * WIDTH)
    arrive_after_copies(q_full.index(0), increment_count=False)
    table, _, first, last = visible_keys(
        query_start_loc, seq_lens, block_table, token, left, right, chunk, num_reqs, stride_table,
        CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    position = entry_positions(entry, rows, first, last, SELECT)
    block = _load_blocks(table, position, BLOCK_SIZE)
    rows += LATENTS
    # Entries are loaded two tiles ahead, and blocks one tile, so that no copy waits for them.
    next_position = entry_positions(next_entry, rows, first, last, SELECT)
    next_block = _load_blocks(table, next_position, BLOCK_SIZE)
    rows += LATENTS
    next_entry = load_entries(entries, rows, limit, SELECT)
    offsets = _offsets(position, block, stride_kb, stride_kn, BLOCK_SIZE)
    sums = gl.zeros([16, LATENTS], gl.float32, COPY)
    _gather_tile(
        key, offsets, position >= 0, ring, k_rotary, p_tile, sums, full, empty, 0, done, RUNNING
    )
    # The first tile is on its way before the warps that multiply have examined the list.
    mbarrier.wait(listed.index(0), number & 1)
    tiles = gl.max(num_tiles.load(ONE), 0)
    for tile in range(1, tiles):
        offsets = _offsets(next_position, next_block, stride_kb, stride_kn, BLOCK_SIZE)
        found = next_position >= 0
        next_position = entry_positions(next_entry, rows, first, last, SELECT)
        next_block = _load_blocks(table, next_position, BLOCK_SIZE)
        rows += LATENTS
        next_entry = load_entries(entries, rows, limit, SELECT)
        sums = _gather_tile(
            key, offsets, found, ring, k_rotary, p_tile, sums, full, empty, tile, done, RUNNING
        )
    if not RUNNING:
        mbarrier.wait(empty.index(BACK), (done + tiles - 1) & 1)
        sums = _add_weights(sums, p_tile)
        rounded_sums.store(gl.sum(sums, 1))
        mbarrier.arrive(summed.index(0), count=1)
    return tiles


@gluon.jit
def _attend(
    entries, begin, end, first, last, has_holes, factor, soft_cap, done, tiles, q_tile, q_rotary,
    ring, k_rotary, p_tile, max_tile, full, empty, SELECT: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_LSE: gl.constexpr, RUNNING: gl.constexpr,
):  # fmt: skip
    """Attend to all tiles of a list.

    Args:
        done: tiles of the lists before.
        RUNNING: weights are relative to the running maxima. Otherwise they are relative to the
            maxima of the first tile: warps need not exchange maxima for each tile, and nothing is
            rescaled.

    Returns:
        (maxima [16], sums of the weights of each latent of a tile, accumulators of the quarters).
        Without RUNNING the sums are needed for the LSE only, and else 0.
    """
    WIDTH: gl.constexpr = ring.shape[2]
    weight_factor = factor
    if HAS_CAP:
        weight_factor = 1.0
    row_max = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(0, COLUMNS))
    # Added up at the end.
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
        mbarrier.wait(full.index(FRONT), (done + tile) & 1)
        # Written by `cp.async`; WGMMA reads shared memory through the async proxy.
        fence_async_shared()
        zero = opaque_zero()
        scores = multiply_keys(scores, ring.index(slot0), q_tile.index(0), False)
        scores = multiply_keys(scores, k_rotary.index(zero), q_rotary.index(zero), True)
        values0 = load_values(ring.index(slot0))
        scores = multiply_keys(scores, ring.index(slot1), q_tile.index(1), True)
        mbarrier.wait(full.index(BACK), (done + tile) & 1)
        fence_async_shared()
        scores = multiply_keys(scores, ring.index(slot2), q_tile.index(2), True)
        scores = multiply_keys(scores, ring.index(slot3), q_tile.index(3), True)
        # The first quarter and the rotary part are free before the last two products complete.
        scores = warpgroup_mma_wait(2, deps=[scores])
        mbarrier.arrive(empty.index(FRONT), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
        first_slot = begin + tile * LATENTS
        if RUNNING and has_holes:
            positions = listed_positions(entries, first_slot + slots, end, first, last, SELECT)
            scores = gl.where((positions >= 0)[:, None], scores, float("-inf"))
        else:
            if first_slot + LATENTS > end:
                scores = gl.where((first_slot + slots < end)[:, None], scores, float("-inf"))
        if RUNNING:
            weights, acc_scale, row_max = softmax_columns(
                scores, factor, row_max, None, None, True, HAS_CAP, max_tile
            )
            sums = sums * acc_scale[None, :]
            acc0 = acc0 * acc_scale[None, :]
            acc1 = acc1 * acc_scale[None, :]
            acc2 = acc2 * acc_scale[None, :]
            acc3 = acc3 * acc_scale[None, :]
        else:
            if tile == 0:
                weights, _, row_max = softmax_columns(
                    scores, factor, row_max, None, None, True, HAS_CAP, max_tile
                )
            else:
                weights = exp2(scores * weight_factor - row_max[None, :])
        if RUNNING or HAS_LSE:
            sums += weights
        store_weights(p_tile.index(0), weights, None, True, KV_PLAIN)
        weights_tile = p_tile.index(opaque_zero())
        # Products that free slots come first.
        acc1 = multiply_values(acc1, ring.index(slot1), weights_tile)
        acc2 = multiply_values(acc2, ring.index(slot2), weights_tile)
        acc3 = multiply_values(acc3, ring.index(slot3), weights_tile)
        acc0 = multiply_loaded_values(acc0, values0, weights_tile)
        acc1, acc2, acc3 = warpgroup_mma_wait(1, deps=[acc1, acc2, acc3])
        mbarrier.arrive(empty.index(BACK), count=1)
        acc0 = warpgroup_mma_wait(0, deps=[acc0])
    return row_max, sums, acc0, acc1, acc2, acc3


@gluon.jit
def _attend_to_list(
    out, partials, lse, sinks, query_start_loc, seq_lens, block_table, indices, scale, soft_cap,
    left, right, chunk, num_reqs, num_tokens, num_heads, num_entries, num_splits, stride_lists,
    stride_table, stride_ot, stride_oh, stride_lt, token, number, done, q_tile, q_rotary, ring,
    k_rotary, p_tile, max_tile, rounded_sums, summed, num_tiles, listed, q_full, q_empty, full,
    empty, SELECT: gl.constexpr, HEADS: gl.constexpr, DV: gl.constexpr, SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, RUNNING: gl.constexpr,
):  # fmt: skip
    """Compute and write the results of a list; returns the number of tiles.

    Arguments as in `_gather_list`.
    """
    WIDTH: gl.constexpr = DV // QUARTERS
    split = gl.program_id(1)
    entries, begin, limit = list_slots(
        indices, token, split, num_entries, num_splits, stride_lists, LATENTS, SELECT, SPLIT
    )
    _, exists, first, last = visible_keys(
        query_start_loc, seq_lens, block_table, token, left, right, chunk, num_reqs, stride_table,
        CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    used, has_holes = count_slots(entries, num_entries, exists, first, last, SELECT)
    end = gl.minimum(limit, used)
    # A CTA without keys masks one tile of zeros. The first tile is copied in any case.
    tiles = gl.maximum(gl.maximum(end - begin + LATENTS - 1, 0) // LATENTS, 1)
    if not RUNNING:
        tiles = gl.where(has_holes, 1, tiles)
    num_tiles.store(gl.full([1], 0, gl.int32, ONE) + tiles)
    mbarrier.arrive(listed.index(0), count=1)
    mbarrier.wait(q_full.index(0), number & 1)
    fence_async_shared()
    ROW: gl.constexpr = gl.SliceLayout(0, COLUMNS)
    factor = score_factor(scale, soft_cap, HAS_CAP)
    row_max, sums, acc0, acc1, acc2, acc3 = _attend(
        entries, begin, end, first, last, has_holes, factor, soft_cap, done, tiles, q_tile,
        q_rotary, ring, k_rotary, p_tile, max_tile, full, empty, SELECT, HAS_CAP, HAS_LSE,
        RUNNING)  # fmt: skip
    # The sum of the LSE, and that by which the output is divided.
    row_sum = gl.sum(sums, 0)
    divisor = row_sum
    if not RUNNING:
        largest: gl.constexpr = LARGEST_SUM_FLOAT16 if ring.dtype == gl.float16 else LARGEST_SUM
        mbarrier.wait(summed.index(0), number & 1)
        divisor = rounded_sums.load(ROW)
        divisor = gl.where((divisor <= largest) & (has_holes == 0), divisor, float("nan"))
    # All warps are done with the queries, whose memory holds the output from now on.
    partition_barrier()

    head = gl.arange(0, 16, ROW)
    valid = head < HEADS
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    out_scale = gl.full([16], 1.0, gl.float32, ROW)
    if HAS_SINK:
        if not SPLIT:
            # Otherwise the sink counts when the splits are combined (M4). Rows after the last
            # request see none.
            sink = gl.load(sinks + head, mask=valid & exists, other=float("-inf"))
            _, _, divisor = add_sink(row_max, divisor, sink)
            finite_max, out_scale, row_sum = add_sink(row_max, row_sum, sink)
    empty_rows = divisor == 0.0
    base2 = finite_max + gl.log2(gl.where(empty_rows, 1.0, row_sum))
    base2 = gl.where(empty_rows, float("-inf"), base2)
    normalizer = (out_scale / gl.where(empty_rows, 1.0, divisor))[None, :]
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
                out, partials, (acc0, acc1, acc2, acc3)[quarter] * normalizer,
                q_tile.index(quarter), 0, stride_oh, place, num_splits, quarter * WIDTH, HEADS, DV,
                False)  # fmt: skip
    if not SPLIT or (split == 0 and not exists):
        for quarter in gl.static_range(QUARTERS):
            _store_quarter(
                out, partials, (acc0, acc1, acc2, acc3)[quarter] * normalizer,
                q_tile.index(quarter), token64 * stride_ot, stride_oh, place, num_splits,
                quarter * WIDTH, HEADS, DV, True)  # fmt: skip
        if HAS_LSE:
            gl.store(lse + token64 * stride_lt + head, base2 * LN2, mask=valid)
    partition_barrier()
    mbarrier.arrive(q_empty.index(0), count=1)
    return tiles


@gluon.jit
def _gatherer(
    out, query, key, query_start_loc, seq_lens, block_table, indices, left, right, chunk, num_reqs,
    repeated_tokens, num_entries, num_splits, stride_lists, stride_table, stride_qt, stride_qh,
    stride_kb, stride_kn, stride_ot, stride_oh, q_tile, q_rotary, ring, k_rotary, p_tile,
    rounded_sums, summed, num_tiles, listed, q_full, q_empty, full, empty, SELECT: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    RUNNING: gl.constexpr, REPEAT: gl.constexpr,
):  # fmt: skip
    """Copy the queries and all tiles of the CTA's lists into shared memory. Four warps."""
    number = 0
    done = 0
    token_end, step = _tokens(repeated_tokens, REPEAT)
    for token in range(gl.program_id(0), token_end, step):
        if not REPEAT or _holds_nan(out, token, stride_ot, stride_oh, HEADS):
            # The list before has released all slots.
            mbarrier.wait(empty.index(BACK), (done & 1) ^ 1)
            done += _gather_list(
                query, key, query_start_loc, seq_lens, block_table, indices, left, right, chunk,
                num_reqs, num_entries, num_splits, stride_lists, stride_table, stride_qt, stride_qh,
                stride_kb, stride_kn, token, number, done, q_tile, q_rotary, ring, k_rotary,
                p_tile, rounded_sums, summed, num_tiles, listed, q_full, q_empty, full, empty,
                SELECT, BLOCK_SIZE, HEADS, SPLIT, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
                RUNNING)  # fmt: skip
            number += 1


@gluon.jit
def _consumer(
    out, partials, lse, sinks, query_start_loc, seq_lens, block_table, indices, scale, soft_cap,
    left, right, chunk, num_reqs, num_tokens, repeated_tokens, num_heads, num_entries, num_splits,
    stride_lists, stride_table, stride_ot, stride_oh, stride_lt, q_tile, q_rotary, ring, k_rotary,
    p_tile, max_tile, rounded_sums, summed, num_tiles, listed, q_full, q_empty, full, empty,
    SELECT: gl.constexpr, HEADS: gl.constexpr, DV: gl.constexpr, SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, RUNNING: gl.constexpr,
    REPEAT: gl.constexpr,
):  # fmt: skip
    """Compute and write the results of the CTA's lists. Four warps."""
    number = 0
    done = 0
    token_end, step = _tokens(repeated_tokens, REPEAT)
    for token in range(gl.program_id(0), token_end, step):
        if not REPEAT or _holds_nan(out, token, stride_ot, stride_oh, HEADS):
            done += _attend_to_list(
                out, partials, lse, sinks, query_start_loc, seq_lens, block_table, indices, scale,
                soft_cap, left, right, chunk, num_reqs, num_tokens, num_heads, num_entries,
                num_splits, stride_lists, stride_table, stride_ot, stride_oh, stride_lt, token,
                number, done, q_tile, q_rotary, ring, k_rotary, p_tile, max_tile, rounded_sums,
                summed, num_tiles, listed, q_full, q_empty, full, empty, SELECT, HEADS, DV, SPLIT,
                CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE,
                RUNNING)  # fmt: skip
            number += 1


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_selected_few_heads_kernel(
    query, key, out, partials, query_start_loc, seq_lens, block_table, indices, sinks, lse, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_heads, num_entries, num_splits,
    stride_lists, stride_table, stride_qt, stride_qh, stride_kb, stride_kn, stride_ot, stride_oh,
    stride_lt, SELECT: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, DV: gl.constexpr, ROTARY: gl.constexpr, SPLIT: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
    GATHERER_REGISTERS: gl.constexpr, RUNNING: gl.constexpr, REPEAT: gl.constexpr,
):  # fmt: skip
    """One CTA of 8 warps. Grid: (tokens, splits). Arguments as in `hopper_selected_latents_kernel`.

    Args:
        HEADS: query heads, at most 16.
        HEAD_BLOCKS: 1.
        GATHERER_REGISTERS: registers of a thread that gathers.
        RUNNING: weights are relative to the running maxima, else to the maxima of the first tile.
        REPEAT: attend only to lists whose outputs are NaN. Grid: (any number, 1).
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
    rounded_sums = gl.allocate_shared_memory(
        gl.float32, [16], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    num_tiles = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    listed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(listed.index(0), count=1)
    mbarrier.init(summed.index(0), count=1)
    mbarrier.init(q_full.index(0), count=128)
    mbarrier.init(q_empty.index(0), count=1)
    for part in gl.static_range(2):
        mbarrier.init(empty.index(part), count=1)
        mbarrier.init(full.index(part), count=128)
    fence_async_shared()
    repeated_tokens = 0
    if REPEAT:
        found = _any_holds_nan(out, num_tokens, stride_ot, stride_oh, HEADS)
        repeated_tokens = gl.where(found, num_tokens, 0)
    gl.warp_specialize(
        [
            (_consumer, (
                out, partials, lse, sinks, query_start_loc, seq_lens, block_table, indices, scale,
                soft_cap, left, right, chunk, num_reqs, num_tokens, repeated_tokens, num_heads,
                num_entries, num_splits, stride_lists, stride_table, stride_ot, stride_oh,
                stride_lt, q_tile, q_rotary, ring, k_rotary, p_tile, max_tile, rounded_sums, summed,
                num_tiles, listed, q_full, q_empty, full, empty, SELECT, HEADS, DV, SPLIT, CAUSAL,
                HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, HAS_SINK, HAS_LSE, RUNNING, REPEAT)),
            (_gatherer, (
                out, query, key, query_start_loc, seq_lens, block_table, indices, left, right,
                chunk, num_reqs, repeated_tokens, num_entries, num_splits, stride_lists,
                stride_table, stride_qt, stride_qh, stride_kb, stride_kn, stride_ot, stride_oh,
                q_tile, q_rotary, ring, k_rotary, p_tile, rounded_sums, summed, num_tiles, listed,
                q_full, q_empty, full, empty, SELECT, BLOCK_SIZE, HEADS, SPLIT, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK, RUNNING, REPEAT)),
        ],
        [4],
        [GATHERER_REGISTERS],
    )  # fmt: skip
