"""The warp that loads tiles of latents in quarters.

At most IN_FLIGHT quarters are in flight, beside the rotary parts: 64 KB of a multiprocessor suffice
for the rate of the memory. With more, some multiprocessors of an H200 read faster than others, and
a decode ends with the slowest: copies read 34.0 to 36.2 GB/s with 64 KB, 31.6 to 48.7 with 192 KB,
4.6 TB/s in all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import arrive_after_copies, copy_to_shared
from attnlib.ops.triton.hopper.kernels.latent_columns import LATENTS
from attnlib.ops.triton.hopper.kernels.latent_pages import load_part
from attnlib.ops.triton.hopper.kernels.latent_splits import split_at
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_memory import QUARTERS

__all__ = ["load_range"]


@gluon.jit
def _copy_scales(cache, pages, tile, memory, stage):
    """Issue the copies of the scales of a tile, which are before the bfloat16 elements of their
    latents; 0 where there is no block. Each of the 32 threads arrives when its copies are
    complete."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    positions = tile * LATENTS + gl.arange(0, LATENTS, gl.SliceLayout(1, LAYOUT))
    column = (positions.to(gl.uint32) // pages.BLOCK_SIZE).to(gl.int32)
    block = gl.load(pages.row + column, mask=column < pages.count, other=pages.num_blocks)
    inside = (block >= 0) & (block < pages.num_blocks)
    offsets = block.to(gl.int64) * cache.stride_latents
    offsets += positions % pages.BLOCK_SIZE * cache.stride_token
    # The launcher checks 16-byte alignment; the shifts tell the compiler.
    offsets = (offsets >> 3) << 3
    scales = (cache.latents - 2 * QUARTERS).to(gl.pointer_type(gl.float32), bitcast=True)
    lanes = gl.arange(0, QUARTERS, gl.SliceLayout(0, LAYOUT))
    pointers = scales + (offsets // 2)[:, None] + lanes[None, :]
    copy_to_shared(memory.rotary.scales.index(stage), pointers, mask=inside[:, None])
    full = memory.rotary.full.index(memory.rotary.FIRST + stage)
    arrive_after_copies(full, increment_count=False)


@gluon.jit
def _load_split(cache, pages, split, memory, step, CONFIG: gl.constexpr):
    """Load all tiles of a split; returns the number of tiles so far.

    Args:
        step: number of tiles before the split.
    """
    quarters = memory.quarters
    rotary = memory.rotary
    WIDTH: gl.constexpr = quarters.memory.shape[2]
    START: gl.constexpr = 0 if CONFIG.GROUP_SCALES else QUARTERS * WIDTH
    first = split.first()
    next_blocks = pages.blocks(first)
    for i in range(0, split.count):
        tile = first + i
        blocks = next_blocks
        # The blocks of the next tile are loaded before the waits for free stages.
        next_blocks = pages.blocks(tile + 1)
        offset = pages.offset(tile)
        for quarter in gl.static_range(QUARTERS):
            number = step * QUARTERS + quarter
            stage = quarters.stage(number)
            quarters.wait_empty(number)
            if number >= CONFIG.IN_FLIGHT:
                quarters.wait_full(number - CONFIG.IN_FLIGHT)
            target = quarters.memory.index(stage)
            full = quarters.full.index(stage)
            load_part(cache.value_desc, blocks, offset, target, full, quarter * WIDTH)
            if quarter == 0:
                stage = step % rotary.STAGES
                rotary.wait_empty(stage, step)
                target = rotary.memory.index(stage)
                full = rotary.full.index(rotary.FIRST + stage)
                load_part(cache.key_desc, blocks, offset, target, full, START)
                if CONFIG.GROUP_SCALES:
                    _copy_scales(cache, pages, tile, memory, stage)
        step += 1
    return step


@gluon.jit
def load_range(cache, keys, own, block, memory, CONFIG: gl.constexpr):
    """Load all tiles of a range. One warp.

    Args:
        cache: the `LatentCache`.
        keys: the `KeyTiles`.
        own: the `TileRange` of the worker.
        block: of query rows.
        memory: the `SwapMemory`.
    """
    request = own.request
    before = own.before
    position = own.begin
    step = 0
    while position < own.end:
        units = keys.count(request, True)
        request_end = before + units
        if position < request_end:
            split = split_at(keys, request, block, units, before, position, own.end)
            pages = cache.pages(request, split.seq_len)
            step = _load_split(cache, pages, split, memory, step, CONFIG)
            position += split.count
        if position >= request_end:
            before = request_end
            request += 1
