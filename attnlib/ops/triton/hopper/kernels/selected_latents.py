"""The Hopper kernel over selected latents (M11, M12): a CTA computes up to 64 heads of one token.

One CTA per (query token, block of heads, split of the list). The partial results of splits and
their combine kernel are those of `ops.triton.kernels.decode`. Consumers read the list for their
masks, so that only copied latents pass through shared memory; only lists with entries that select
nothing between others need it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import arrive_after_copies
from attnlib.ops.triton.hopper.kernels.decode_call import Outputs
from attnlib.ops.triton.hopper.kernels.latent_steps import attend_both, attend_other, attend_own
from attnlib.ops.triton.hopper.kernels.latent_tiles import (
    HIGH,
    LOW,
    PARTS,
    ROTARY_PART,
    TILE,
    allocate_tiles,
)
from attnlib.ops.triton.hopper.kernels.logits import logits_of
from attnlib.ops.triton.hopper.kernels.schedule import Batch, Mask
from attnlib.ops.triton.hopper.kernels.selected_latents_store import store_half
from attnlib.ops.triton.hopper.kernels.selected_latents_work import list_work
from attnlib.ops.triton.hopper.kernels.selected_lists import UNALIGNED, UNSPECIALIZED, KeyLists
from attnlib.ops.triton.hopper.kernels.selected_rows import (
    SelectedInputs,
    SelectedResults,
    gather_part,
)
from attnlib.ops.triton.hopper.kernels.softmax import add_sink

__all__ = ["consume_lists", "copy_part", "hopper_selected_latents_kernel"]


@gluon.jit
def copy_part(
    base,
    offsets,
    exists,
    tiles,
    parity,
    START: gl.constexpr,
    PART: gl.constexpr,
    INDEX: gl.constexpr,
):
    """Copy a part of tile A or B into shared memory once its memory is free."""
    tiles.wait_free(PART, parity, INDEX)
    target = tiles.latents.part(PART).index(INDEX)
    gather_part(base, offsets, exists, target, START)
    arrive_after_copies(tiles.full.index(INDEX * PARTS + PART), increment_count=False)


@gluon.jit
def _gatherer(inputs, work, table, tiles, HEADS: gl.constexpr):
    """Copy the queries and all pairs of tiles into shared memory. One warpgroup."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    queries = tiles.queries
    HALF: gl.constexpr = queries.low.shape[2]
    heads = (work.head_offset + rows).to(gl.int64)
    offsets = inputs.query_offsets(work.token, heads)
    gather_part(inputs.query, offsets, rows < HEADS, queries.rotary.index(0), 2 * HALF)
    gather_part(inputs.query, offsets, rows < HEADS, queries.low.index(0), 0)
    gather_part(inputs.query, offsets, rows < HEADS, queries.high.index(0), HALF)
    arrive_after_copies(tiles.queries_full.index(0), increment_count=False)
    # Positions and blocks are loaded one tile ahead.
    list_slots = work.slots()
    visible = work.visible(table)
    begin = work.begin
    position = list_slots.positions(begin + rows, visible)
    block = inputs.blocks(position, visible)
    for pair in range(work.pairs):
        for tile in gl.static_range(2):
            slots = begin + (2 * pair + tile + 1) * TILE + rows
            next_position = list_slots.positions(slots, visible)
            next_block = inputs.blocks(next_position, visible)
            offsets = inputs.latent_offsets(position, block)
            exists = position >= 0
            # The parity is inverted, so that the first use of each buffer does not wait.
            parity = (pair & 1) ^ 1
            copy_part(inputs.key, offsets, exists, tiles, parity, 2 * HALF, ROTARY_PART, tile)
            if tile == 0:
                copy_part(inputs.key, offsets, exists, tiles, parity, 0, LOW, tile)
                copy_part(inputs.key, offsets, exists, tiles, parity, HALF, HIGH, tile)
            else:
                copy_part(inputs.key, offsets, exists, tiles, parity, HALF, HIGH, tile)
                copy_part(inputs.key, offsets, exists, tiles, parity, 0, LOW, tile)
            position = next_position
            block = next_block


@gluon.jit
def _attend(work, tiles, logits, HALF: gl.constexpr, CONSUMER: gl.constexpr):
    """Attend to all tiles.

    Returns:
        (accumulators [64, HALF], maxima [64], sums of the weights of both consumers [64]).
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    row_max = gl.full([64], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([64], gl.float32, ROW)
    acc = gl.zeros([64, HALF], gl.float32, VALUES)
    columns = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    # Wait for the copies of the queries, which WGMMA reads through the async proxy.
    mbarrier.wait(tiles.queries_full.index(0), 0)
    fence_async_shared()
    begin = work.begin
    if CONSUMER == 0:
        if work.pairs > 0:
            keys = work.keys(begin, columns)
            acc, row_max, row_sum = attend_own(
                acc, row_max, row_sum, keys, 0, tiles, logits, CONSUMER
            )
    # Consumer 0 attends to a tile A together with the tile B before it.
    for pair in range(1 - CONSUMER, work.pairs):
        slot = begin + (2 * pair + CONSUMER) * TILE
        keys = work.keys(slot, columns)
        parity = pair & 1
        other_parity = (pair + CONSUMER + 1) & 1
        acc, row_max, row_sum = attend_both(
            acc, row_max, row_sum, keys, parity, other_parity, tiles, logits, CONSUMER
        )
    if CONSUMER == 0:
        if work.pairs > 0:
            parity = (work.pairs - 1) & 1
            acc, row_max, row_sum = attend_other(acc, row_max, row_sum, parity, tiles, CONSUMER)
    return acc, row_max, tiles.total_sum(row_sum, 0, CONSUMER)


@gluon.jit
def consume_lists(
    results,
    work,
    tiles,
    scale,
    soft_cap,
    CONFIG: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Compute and write one half of the value elements."""
    logits = logits_of(scale, soft_cap, CONFIG.HAS_CAP)
    acc, row_max, row_sum = _attend(work, tiles, logits, CONFIG.DV // 2, CONSUMER)

    VALUES: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = row_max.type.layout
    head = work.head_offset + gl.arange(0, 64, ROW)
    valid = gl.arange(0, 64, ROW) < CONFIG.HEADS
    finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    acc_scale = gl.full([64], 1.0, gl.float32, ROW)
    if CONFIG.HAS_SINK:
        if not CONFIG.SPLIT:
            # Otherwise the sink counts when the splits are combined (M4). Rows after the last
            # request see none.
            seen = valid & work.exists
            sink = gl.load(results.outputs.sinks + head, mask=seen, other=float("-inf"))
            finite_max, acc_scale, row_sum = add_sink(row_max, row_sum, sink)
    empty = row_sum == 0.0
    safe_sum = gl.where(empty, 1.0, row_sum)
    base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
    out_factor = gl.convert_layout(acc_scale / safe_sum, gl.SliceLayout(1, VALUES))
    result = acc * out_factor[:, None]
    store_half(results, result, base2, head, valid, work, tiles, CONFIG, CONSUMER)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_selected_latents_kernel(
    query, key, out, partials, query_start_loc, seq_lens, block_table, indices, sinks, lse, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_heads, num_entries, num_splits,
    stride_lists, stride_table, stride_qt, stride_qh, stride_kb, stride_kn, stride_ot, stride_oh,
    stride_lt, CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 12 warps. Grid: (tokens * HEAD_BLOCKS, splits).

    Args:
        partials: float32 partial results, see `SelectedResults`.
        indices: the lists, [tokens, ..., entries].
        num_entries: entries of a list.
        num_splits: splits of each list.
        CONFIG: a `SelectedConfig` with at most 64 HEADS.
    """
    DTYPE: gl.constexpr = query.dtype.element_ty
    tiles = allocate_tiles(CONFIG.DV, CONFIG.ROTARY, DTYPE, GATHERED=True)
    fence_async_shared()
    mask = Mask(
        left, right, chunk, CONFIG.CAUSAL, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, CONFIG.HAS_CHUNK
    )
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, None, stride_table)
    lists = KeyLists(
        batch, mask, indices, num_entries, num_splits, stride_lists, CONFIG.SELECT, CONFIG.SPLIT
    )
    inputs = SelectedInputs(
        query, key, stride_qt, stride_qh, stride_kb, stride_kn, CONFIG.BLOCK_SIZE
    )
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    results = SelectedResults(
        outputs, partials, num_tokens, num_heads, num_splits, CONFIG.HEADS, CONFIG.DV
    )
    work, table = list_work(lists, CONFIG.HEADS, CONFIG.HEAD_BLOCKS)
    gl.warp_specialize(
        [
            (_gatherer, (inputs, work, table, tiles, CONFIG.HEADS)),
            (consume_lists, (results, work, tiles, scale, soft_cap, CONFIG, 0)),
            (consume_lists, (results, work, tiles, scale, soft_cap, CONFIG, 1)),
        ],
        [4, 4],
        [CONFIG.REGISTERS, CONFIG.REGISTERS],
    )
