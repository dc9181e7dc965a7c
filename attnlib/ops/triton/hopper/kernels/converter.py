"""The converter warps of the Hopper prefill over a float8 cache.

They convert each tile once for all consumers, from the rings that TMA fills to those that the
products read. FlashAttention-3 reads 8-bit operands directly instead, which needs 8-bit queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import partition_barrier
from attnlib.ops.triton.hopper.kernels.quantized import float16_pairs, split_pairs

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
def _next_tile(source, target, step, valid, KV_KIND: gl.constexpr):
    """Convert the tile number `step` of a ring of bytes into the ring of the products.

    Rows from `valid` on become 0: a page may hold anything past the end, and 0 * NaN is NaN (P5).
    """
    BLOCK_N: gl.constexpr = target.memory.shape[1]
    stage = step % target.STAGES
    from_stage = step % source.STAGES
    mbarrier.wait(source.full.index(from_stage), (step // source.STAGES) & 1)
    # Inverted, so that the first pass over the ring does not wait.
    mbarrier.wait(target.empty.index(stage), ((step // target.STAGES) & 1) ^ 1)
    if valid < BLOCK_N:
        _convert_tile(
            source.memory.index(from_stage), target.memory.index(stage), valid, True, KV_KIND
        )
    else:
        _convert_tile(
            source.memory.index(from_stage), target.memory.index(stage), valid, False, KV_KIND
        )
    # WGMMA reads shared memory through the async proxy.
    fence_async_shared()
    partition_barrier()
    mbarrier.arrive(source.empty.index(from_stage), count=1)
    mbarrier.arrive(target.full.index(stage), count=1)


@gluon.jit
def converter(call, stored, storage):
    """Convert the float8 keys and values of the published work tiles to float16. 2 or 4 warps.

    All consumers share the result, so that each element is converted once per CTA.

    Args:
        call: `PrefillCall`.
        stored: `PrefillStorage` whose rings hold bytes.
        storage: `PrefillStorage` whose rings the products read.
    """
    KV_KIND: gl.constexpr = call.config.KV_KIND
    BLOCK_N: gl.constexpr = call.config.BLOCK_N
    mail = 0
    step = 0
    request = 0
    while request >= 0:
        work = storage.mailbox.receive(mail, True)
        request = work.request
        mail += 1
        if (request >= 0) & (request < call.batch.num_reqs):
            tiles = call.tiles(work)
            # In the order of the products: the keys of a tile before the values of the tile before
            # it, whose stage becomes free later.
            for back in range(0, tiles.end - tiles.begin):
                _next_tile(stored.keys, storage.keys, step, BLOCK_N, KV_KIND)
                if back > 0:
                    later = tiles.at(tiles.end - back)
                    _next_tile(
                        stored.values,
                        storage.values,
                        step - 1,
                        work.seq_len - later * BLOCK_N,
                        KV_KIND,
                    )
                step += 1
            if tiles.end > tiles.begin:
                first = tiles.at(tiles.begin)
                _next_tile(
                    stored.values, storage.values, step - 1, work.seq_len - first * BLOCK_N, KV_KIND
                )
