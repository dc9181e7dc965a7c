"""The Hopper decode of batches with shared prefixes: prefixes and suffixes in one launch.

Work distribution (stream-K, Osama et al. 2023). A host schedule lists items: query rows of one or
two products per KV head, and segments of keys that parts of these rows see, which are shared
prefixes and the keys that one request has for itself. The tiles of all items form one line, which
is cut into similar ranges. Each range has NUM_KV_HEADS consecutive CTAs, one per KV head. The tiles
of one item in one range are a split; each split writes a partial result, and
`hopper_merge_rows_kernel` merges those of each row.

A CTA has two consumer warpgroups of 64 query rows, one warp that loads keys and one that loads
values. Items of more than 64 rows are computed by both consumers, tile by tile, with different
rows. Of an item of fewer rows each consumer computes every second tile, and the first consumer adds
the result of the second one to its own before it writes them. Rows that do not see a segment are
masked: the beginning and the end of an item take longer than several tiles, so that an item for
each request would take longer than products of which most rows are masked.

Query rows are the rows of the products, because a prefix has many; the decode of single requests
(`decode.py`) has them as columns. Sources: Hydragen (Juravsky et al., 2024), cascade inference
(Ye et al., FlashInfer, 2024).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.cache_tiles import allocate_rings
from attnlib.ops.triton.hopper.kernels.compat import (
    prefetch_l1,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.ring import ring_pair
from attnlib.ops.triton.hopper.kernels.shared_consumer import SharedDecodeCall, shared_consumer
from attnlib.ops.triton.hopper.kernels.shared_schedule import Schedule
from attnlib.ops.triton.hopper.kernels.shared_sums import ROWS, allocate_exchange
from attnlib.ops.triton.hopper.kernels.tma_load import RequestPages

__all__ = [
    "SharedDecodeConfig",
    "hopper_shared_decode_kernel",
]


class SharedDecodeConfig(NamedTuple):
    """Constants of the kernel.

    Attributes:
        NUM_KV_HEADS: KV heads.
        GROUP: query heads of a KV head.
        D, DV: head sizes of keys and values.
        WIDTH, WIDTH_V: padded head sizes, the elements of a row of a tile.
        BLOCK_N: keys of a tile.
        BLOCK_SIZE: positions of a page.
        STAGES: stages of the rings of keys and values.
        HAS_CAP: whether there is a soft cap.
    """

    NUM_KV_HEADS: int
    GROUP: int
    D: int
    DV: int
    WIDTH: int
    WIDTH_V: int
    BLOCK_N: int
    BLOCK_SIZE: int
    STAGES: int
    HAS_CAP: bool


@gluon.jit
def _loader(cache, schedule, block_table, num_blocks, stride_table, ring, config):
    """Load the key or value tiles of the CTA's range into a ring, by one warp, segment after
    segment."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    BLOCK_SIZE: gl.constexpr = config.BLOCK_SIZE
    # PDL: the schedule is copied from the host, and not written by the previous kernel.
    own = schedule.own_range(config.NUM_KV_HEADS)
    position = own.begin
    step = 0
    segment = schedule.loaded_segment(own.segment)
    # The previous kernel may have written the cache and the block table.
    wait_on_dependent_grids()
    while position < own.end:
        # Segments may be short: the fields of the next one are loaded, and its pages prefetched,
        # before they are needed.
        following = segment.following()
        skipped = position - segment.begin
        count = gl.minimum(segment.tiles - skipped, own.end - position)
        pages = (segment.keys + BLOCK_SIZE - 1) // BLOCK_SIZE
        table = block_table + segment.row.to(gl.int64) * stride_table + segment.column
        if position + count < own.end:
            next_row = block_table + following.row.to(gl.int64) * stride_table
            prefetch_l1(next_row + following.column)
        cached = RequestPages(cache, table, pages, num_blocks, own.kv_head, BLOCK_SIZE, "nhd")
        for i in range(0, count):
            tile = skipped + i
            # 32 pages ahead: one 128-byte line of the block table.
            cached.load(ring, step, tile, tile * BLOCK_N // BLOCK_SIZE + 32)
            step += 1
        position += count
        segment = following


@gluon.jit(
    do_not_specialize=["num_blocks", "num_rows", "stride_qt", "stride_qh", "stride_table"],
    do_not_specialize_on_alignment=["ranges", "segments", "items", "tokens", "block_table"],
)
def hopper_shared_decode_kernel(
    key_desc,
    value_desc,
    query,
    ranges,
    segments,
    items,
    tokens,
    block_table,
    partial_out,
    partial_lse,
    scale,
    soft_cap,
    num_blocks,
    num_rows,
    stride_qt,
    stride_qh,
    stride_table,
    CONFIG: gl.constexpr,
):
    """One CTA of 4 + 4 + 1 + 1 warps. Grid: ranges * NUM_KV_HEADS, all resident at the same time.

    Args:
        key_desc, value_desc: TMA descriptors of the caches.
        ranges: int32 [ranges, 4]; `ops.shared_decode` describes the lists.
        segments: int32 [segments, SEGMENT_FIELDS].
        items: int32 [items, ITEM_FIELDS].
        tokens: int32, rows of `query`, those of each item together.
        partial_out: float32 [P, Hq, DV], written.
        partial_lse: float32 [P, Hq], base-2 log-sum-exps, written.
        num_rows: tokens of `query`.
        CONFIG: `SharedDecodeConfig`.
    """
    CACHE: gl.constexpr = key_desc.dtype
    STAGES: gl.constexpr = CONFIG.STAGES
    WIDTH: gl.constexpr = CONFIG.WIDTH
    WIDTH_V: gl.constexpr = CONFIG.WIDTH_V
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], CACHE)
    q_tile0 = gl.allocate_shared_memory(CACHE, [ROWS, WIDTH], Q_SHARED)
    q_tile1 = gl.allocate_shared_memory(CACHE, [ROWS, WIDTH], Q_SHARED)
    k_memory, v_memory = allocate_rings(
        CACHE, STAGES, CONFIG.BLOCK_N, WIDTH, WIDTH_V, CONFIG.BLOCK_SIZE, False
    )
    # Both consumers release a stage.
    keys, values = ring_pair(k_memory, v_memory, STAGES, RELEASES=2)
    # For items that both consumers compute in turn.
    exchange = allocate_exchange(WIDTH_V)
    # Makes the initialized barriers visible to TMA.
    fence_async_shared()
    schedule = Schedule(ranges, segments, items, tokens)
    call = SharedDecodeCall(
        query=query,
        schedule=schedule,
        partial_out=partial_out,
        partial_lse=partial_lse,
        scale=scale,
        soft_cap=soft_cap,
        num_rows=num_rows,
        stride_qt=stride_qt,
        stride_qh=stride_qh,
        keys=keys,
        values=values,
        exchange=exchange,
        config=CONFIG,
    )
    gl.warp_specialize(
        [
            (shared_consumer, (call, q_tile0, 0)),
            (shared_consumer, (call, q_tile1, 1)),
            (_loader, (key_desc, schedule, block_table, num_blocks, stride_table, keys, CONFIG)),
            (
                _loader,
                (value_desc, schedule, block_table, num_blocks, stride_table, values, CONFIG),
            ),
        ],
        [4, 1, 1],
        # Registers per thread of the second consumer and of the loader warps.
        [216, 48, 48],
    )
