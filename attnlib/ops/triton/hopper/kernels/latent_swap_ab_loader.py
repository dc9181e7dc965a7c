"""The warp that loads tiles of latents in quarters, for up to 16 query rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.latent_pages import load_part
from attnlib.ops.triton.hopper.kernels.latent_splits import split_at
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_memory import QUARTERS, ROTARY_STAGES, STAGES

__all__ = ["load_range"]

IN_FLIGHT: gl.constexpr = gl.constexpr(4)
"""Quarters (64 KB) of a multiprocessor in flight, at most, beside the rotary parts. They suffice
for the rate of the memory. With more, some multiprocessors of an H200 read faster than others, and
a decode ends with the slowest: copies read 34.0 to 36.2 GB/s with 64 KB, 31.6 to 48.7 with 192 KB,
4.6 TB/s in all."""


@gluon.jit
def _load_split(cache, pages, split, memory, step):
    """Load all tiles of a split; returns the number of tiles so far.

    Args:
        step: number of tiles before the split.
    """
    quarters = memory.quarters
    rotary = memory.rotary
    WIDTH: gl.constexpr = quarters.memory.shape[2]
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
            if number >= IN_FLIGHT:
                quarters.wait_full(number - IN_FLIGHT)
            target = quarters.memory.index(stage)
            full = quarters.full.index(stage)
            load_part(cache.value_desc, blocks, offset, target, full, quarter * WIDTH)
            if quarter == 0:
                stage = step % ROTARY_STAGES
                rotary.wait_empty(stage, step)
                target = rotary.memory.index(stage)
                full = rotary.full.index(STAGES + stage)
                load_part(cache.key_desc, blocks, offset, target, full, QUARTERS * WIDTH)
        step += 1
    return step


@gluon.jit
def load_range(cache, keys, own, memory):
    """Load all tiles of the CTA's range. One warp.

    Args:
        cache: the `LatentCache`.
        keys: the `KeyTiles`.
        own: the `TileRange` of the CTA.
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
            split = split_at(keys, request, 0, units, before, position, own.end)
            pages = cache.pages(request, split.seq_len)
            step = _load_split(cache, pages, split, memory, step)
            position += split.count
        if position >= request_end:
            before = request_end
            request += 1
