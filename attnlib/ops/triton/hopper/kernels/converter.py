"""The converter warps of the Hopper prefill over a float8 cache.

They convert each tile once for all consumers, from the rings that TMA fills to those that the
products read. FlashAttention-3 reads 8-bit operands directly instead, which needs 8-bit queries.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier
from attnlib.ops.triton.hopper.kernels.mailbox import read_field, read_tiles
from attnlib.ops.triton.hopper.kernels.quantized import float16_pairs, split_pairs
from attnlib.ops.triton.hopper.kernels.schedule import tile_at, visited_tiles

__all__ = ["converter"]


@gluon.jit
def _convert_tile(source, target, valid, MASKED: gl.constexpr, KV_KIND: gl.constexpr):
    """Convert a tile [N, W // 2], pairs of float8, to float16 [N, W] in shared memory.

    With MASKED, rows from `valid` on become 0. All warps of the partition take part.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = source.shape[0]
    WORDS: gl.constexpr = source.shape[1]
    # 8 bytes of a row become 16: neither the loads nor the stores have bank conflicts.
    LANES: gl.constexpr = min(32, WORDS // 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    STEP: gl.constexpr = min(ROWS, 512 * WARPS // WORDS)  # 32 bytes per thread
    for start in gl.static_range(0, ROWS, STEP):
        words = source.slice(start, STEP, 0).load(LAYOUT)
        if MASKED:
            rows = start + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
            zeros = gl.zeros([STEP, WORDS], gl.int16, LAYOUT)
            words = gl.where(rows[:, None] < valid, words, zeros)
        target.slice(start, STEP, 0).store(split_pairs(float16_pairs(words, KV_KIND)))


@gluon.jit
def _next_tile(
    source, target, loaded, released, full, empty, step, valid, STAGES: gl.constexpr,
    BYTE_STAGES: gl.constexpr, KV_KIND: gl.constexpr,
):  # fmt: skip
    """Convert the tile number `step` of a ring of bytes into the ring of the products.

    Rows from `valid` on become 0: a page may hold anything past the end, and 0 * NaN is NaN (P5).
    """
    BLOCK_N: gl.constexpr = target.shape[1]
    stage = step % STAGES
    from_stage = step % BYTE_STAGES
    mbarrier.wait(loaded.index(from_stage), (step // BYTE_STAGES) & 1)
    # Inverted, so that the first pass over the ring does not wait.
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    if valid < BLOCK_N:
        _convert_tile(source.index(from_stage), target.index(stage), valid, True, KV_KIND)
    else:
        _convert_tile(source.index(from_stage), target.index(stage), valid, False, KV_KIND)
    # WGMMA reads shared memory through the async proxy.
    fence_async_shared()
    partition_barrier()
    mbarrier.arrive(released.index(from_stage), count=1)
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def converter(
    left, right, chunk, num_reqs, mailbox, k_bytes, v_bytes, k_ring, v_ring, mail_full, mail_empty,
    kb_full, kb_empty, vb_full, vb_empty, k_full, k_empty, v_full, v_empty,
    RANGES: gl.constexpr, TILE_TOKENS: gl.constexpr, STAGES: gl.constexpr,
    BYTE_STAGES: gl.constexpr, FIELDS: gl.constexpr, CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, KV_KIND: gl.constexpr,
):  # fmt: skip
    """Convert the float8 keys and values of the published work items to float16. 2 or 4 warps.

    All consumers share the result, so that each element is converted once per CTA.
    """
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    mail = 0
    step = 0
    request = 0
    while request >= 0:
        slot = mail % 2
        mbarrier.wait(mail_full.index(slot), (mail // 2) & 1)
        request = read_field(mailbox, slot * FIELDS)
        first_token = read_field(mailbox, slot * FIELDS + 2)
        query_len = read_field(mailbox, slot * FIELDS + 4)
        seq_len = read_field(mailbox, slot * FIELDS + 5)
        begin, _, _, end, _, _, after_gap, gap = read_tiles(mailbox, slot, RANGES, FIELDS)
        # All warps have read the slot.
        partition_barrier()
        mbarrier.arrive(mail_empty.index(slot), count=1)
        mail += 1
        if (request >= 0) & (request < num_reqs):
            if RANGES == 0:
                begin, _, _, end = visited_tiles(
                    first_token, query_len, seq_len, left, right, chunk, request, None, None,
                    TILE_TOKENS, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            # In the order of the products: the keys of a tile before the values of the tile before
            # it, whose stage becomes free later.
            for back in range(0, end - begin):
                _next_tile(
                    k_bytes, k_ring, kb_full, kb_empty, k_full, k_empty, step, BLOCK_N, STAGES,
                    BYTE_STAGES, KV_KIND)  # fmt: skip
                if back > 0:
                    later = tile_at(end - back, after_gap, gap, RANGES)
                    _next_tile(
                        v_bytes, v_ring, vb_full, vb_empty, v_full, v_empty, step - 1,
                        seq_len - later * BLOCK_N, STAGES, BYTE_STAGES, KV_KIND)  # fmt: skip
                step += 1
            if end > begin:
                first = tile_at(begin, after_gap, gap, RANGES)
                _next_tile(
                    v_bytes, v_ring, vb_full, vb_empty, v_full, v_empty, step - 1,
                    seq_len - first * BLOCK_N, STAGES, BYTE_STAGES, KV_KIND)  # fmt: skip
