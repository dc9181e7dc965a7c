"""The Hopper kernel over two key streams (M12, M17): own latents in a window and compressed entries
under one softmax. A CTA computes up to 64 heads of one token.

One CTA per (query token, block of heads, split of the slots). It multiplies as the kernel over
selected latents; only where its keys are found differs (`stream_work`).

With EARLY, the queries of a token are copied before its request is known: both take a read of
memory or more. Where many CTAs follow each other, that would delay the reads of the request.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import (
    arrive_after_copies,
    launch_dependent_grids,
    partition_barrier,
)
from attnlib.ops.triton.hopper.kernels.decode_call import Outputs
from attnlib.ops.triton.hopper.kernels.latent_tiles import HIGH, LOW, TILE, allocate_tiles
from attnlib.ops.triton.hopper.kernels.schedule import Batch, Mask
from attnlib.ops.triton.hopper.kernels.selected_latents import consume_lists, copy_part
from attnlib.ops.triton.hopper.kernels.selected_lists import UNALIGNED, UNSPECIALIZED, KeyLists
from attnlib.ops.triton.hopper.kernels.selected_rows import SelectedResults, gather_part
from attnlib.ops.triton.hopper.kernels.stream_work import (
    StreamInputs,
    stream_work,
    token_of_cta,
)

__all__ = ["hopper_streams_kernel"]


_COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Threads that copy rows of latents or queries."""


@gluon.jit
def _copy_queries(query, stride_qt, stride_qh, tiles, CONFIG: gl.constexpr):
    """Copy the queries of this CTA into shared memory. Four warps."""
    rows = gl.arange(0, TILE, gl.SliceLayout(1, _COPIES))
    token, head_offset = token_of_cta(CONFIG)
    heads = (head_offset + rows).to(gl.int64)
    offsets = token.to(gl.int64) * stride_qt + heads * stride_qh
    HALF: gl.constexpr = CONFIG.DV // 2
    gather_part(query, offsets, rows < CONFIG.HEADS, tiles.queries.low.index(0), 0)
    gather_part(query, offsets, rows < CONFIG.HEADS, tiles.queries.high.index(0), HALF)
    arrive_after_copies(tiles.queries_full.index(0), increment_count=False)


@gluon.jit
def _gatherer(inputs, work, query, stride_qt, stride_qh, tiles, CONFIG: gl.constexpr):
    """Copy the queries, if they are not copied yet, and all pairs of tiles into shared memory. One
    warpgroup."""
    rows = gl.arange(0, TILE, gl.SliceLayout(1, _COPIES))
    HALF: gl.constexpr = CONFIG.DV // 2
    # Positions and blocks are loaded one tile ahead.
    position = work.positions(work.begin, rows)
    block = inputs.blocks(work.begin, position)
    if not CONFIG.EARLY:
        _copy_queries(query, stride_qt, stride_qh, tiles, CONFIG)
    for pair in range(work.pairs):
        for tile in gl.static_range(2):
            slot = work.begin + (2 * pair + tile) * TILE
            next_position = work.positions(slot + TILE, rows)
            next_block = inputs.blocks(slot + TILE, next_position)
            base, offsets = inputs.latents(slot, position, block)
            exists = position >= 0
            # The parity is inverted, so that the first use of each buffer does not wait.
            parity = (pair & 1) ^ 1
            # The half that the owner of the tile accumulates comes first.
            if tile == 0:
                copy_part(base, offsets, exists, tiles, parity, 0, LOW, tile)
                copy_part(base, offsets, exists, tiles, parity, HALF, HIGH, tile)
            else:
                copy_part(base, offsets, exists, tiles, parity, HALF, HIGH, tile)
                copy_part(base, offsets, exists, tiles, parity, 0, LOW, tile)
            position = next_position
            block = next_block


@gluon.jit(
    do_not_specialize=[*UNSPECIALIZED, "stride_entry_table", "stride_eb", "stride_en"],
    do_not_specialize_on_alignment=[*UNALIGNED, "entry_table", "entry_counts"],
)
def hopper_streams_kernel(
    query, key, entry, out, partials, query_start_loc, seq_lens, block_table, entry_counts,
    entry_table, indices, sinks, lse, scale, soft_cap, left, right, num_reqs, num_tokens, num_heads,
    num_entries, num_splits, stride_lists, stride_table, stride_entry_table, stride_qt, stride_qh,
    stride_kb, stride_kn, stride_eb, stride_en, stride_ot, stride_oh, stride_lt,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """One CTA of 12 warps. Grid: (tokens * HEAD_BLOCKS, splits).

    Args:
        partials: float32 partial results, see `SelectedResults`.
        entry_counts: [tokens], the entries that each token may see.
        entry_table: [tokens, pages], the blocks of the entries of each token's request.
        indices: the lists, [tokens, ..., entries]; not read without LISTED.
        num_entries: entries of a list; without LISTED, at least all of `entry_counts`.
        num_splits: splits of the slots.
        CONFIG: a `StreamConfig` with at most 64 HEADS.
    """
    tiles = allocate_tiles(CONFIG.DV, 0, query.dtype.element_ty, GATHERED=True)
    fence_async_shared()
    if CONFIG.EARLY:
        # The barrier of the queries is initialized by one thread, and all threads arrive on it.
        partition_barrier()
        _copy_queries(query, stride_qt, stride_qh, tiles, CONFIG)
    if CONFIG.SPLIT:
        # The combine kernel waits for the results.
        launch_dependent_grids()
    mask = Mask(left, right, None, CONFIG.CAUSAL, True, CONFIG.HAS_RIGHT, False)
    batch = Batch(query_start_loc, seq_lens, block_table, num_reqs, None, stride_table)
    lists = KeyLists(batch, mask, indices, num_entries, num_splits, stride_lists, 1, CONFIG.SPLIT)
    work, table = stream_work(lists, entry_counts, CONFIG)
    inputs = StreamInputs(
        key,
        entry,
        table,
        entry_table + work.token.to(gl.int64) * stride_entry_table,
        stride_kb,
        stride_kn,
        stride_eb,
        stride_en,
        CONFIG.OWN,
        CONFIG.BLOCK_SIZE,
        CONFIG.ENTRY_BLOCK,
    )
    outputs = Outputs(out, lse, sinks, stride_ot, stride_oh, stride_lt)
    results = SelectedResults(
        outputs, partials, num_tokens, num_heads, num_splits, CONFIG.HEADS, CONFIG.DV
    )
    gl.warp_specialize(
        [
            (_gatherer, (inputs, work, query, stride_qt, stride_qh, tiles, CONFIG)),
            (consume_lists, (results, work, tiles, scale, soft_cap, CONFIG, 0)),
            (consume_lists, (results, work, tiles, scale, soft_cap, CONFIG, 1)),
        ],
        [4, 4],
        [CONFIG.REGISTERS, CONFIG.REGISTERS],
    )
