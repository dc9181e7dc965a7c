"""The warps that convert 8-bit latents to the quarters of a consumer of up to 32 query rows.

Four warps load the bytes of the next tile into registers while they convert a tile. With CONVERTS,
consumers are those of 16-bit caches.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.latent_columns import LATENTS
from attnlib.ops.triton.hopper.kernels.latent_splits import split_at
from attnlib.ops.triton.hopper.kernels.latent_stored import (
    publish,
    quarter_elements,
    rotary_elements,
    stored_latents,
)
from attnlib.ops.triton.hopper.kernels.latent_swap_ab_memory import QUARTERS

__all__ = ["convert_range"]


@gluon.jit
def _load_first(cache, rows):
    """Load the words of a tile: those of the elements after the values, and the quarters."""
    quarters = ()
    for quarter in gl.static_range(QUARTERS):
        quarters = quarters + (cache.load_quarter(rows, quarter),)
    return cache.load_rotary(rows), quarters


@gluon.jit
def _convert_tile(cache, rotary, quarters, next_rows, memory, step):
    """Convert a tile, each part as soon as its memory is free.

    Args:
        rotary, quarters: words of the tile.
        next_rows: of the tile after it.
        step: number of the tile.

    Returns:
        (rotary, quarters) of the tile after it.
    """
    CONFIG: gl.constexpr = cache.config
    ring = memory.quarters
    DTYPE: gl.constexpr = ring.memory.dtype
    following = ()
    for quarter in gl.static_range(QUARTERS):
        number = step * QUARTERS + quarter
        stage = ring.stage(number)
        ring.wait_empty(number)
        elements = quarter_elements(quarters[quarter], DTYPE, CONFIG)
        publish(ring.memory.index(stage), elements, ring.full.index(stage))
        following = following + (cache.load_quarter(next_rows, quarter),)
        if quarter == 0:
            stage = step % memory.rotary.STAGES
            memory.rotary.wait_empty(stage, step)
            elements = rotary_elements(rotary, DTYPE, CONFIG)
            full = memory.rotary.full.index(memory.rotary.FIRST + stage)
            publish(memory.rotary.memory.index(stage), elements, full)
            rotary = cache.load_rotary(next_rows)
    return rotary, following


@gluon.jit
def _convert_split(cache, pages, split, memory, step, CONFIG: gl.constexpr):
    """Convert all tiles of a split; returns the number of tiles so far.

    Args:
        step: number of tiles before the split.
    """
    first = split.first()
    end = split.seq_len
    rotary, quarters = _load_first(cache, cache.tile_rows(pages, first, end))
    if CONFIG.IN_FLIGHT > 0:
        cache.prefetch(pages, (first + 1) * LATENTS, 2 * LATENTS, end)
    for i in range(0, split.count):
        if CONFIG.IN_FLIGHT > 0:
            # Two tiles for every second one: each thread has one latent.
            if (i % 2 == 1) & (i + 2 < split.count):
                cache.prefetch(pages, (first + i + 2) * LATENTS, 2 * LATENTS, end)
        # Nothing after the split is loaded.
        rows = cache.tile_rows(pages, first + i + 1, gl.where(i + 1 < split.count, end, 0))
        rotary, quarters = _convert_tile(cache, rotary, quarters, rows, memory, step)
        step += 1
    return step


@gluon.jit
def convert_range(cache, keys, own, block, memory, CONFIG: gl.constexpr):
    """Load and convert all tiles of the CTA's range. Four warps.

    Arguments as of `latent_swap_ab_loader.load_range`; the `LatentCache` has strides of blocks and
    tokens.
    """
    stored = stored_latents(cache, CONFIG)
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
            step = _convert_split(stored, pages, split, memory, step, CONFIG)
            position += split.count
        if position >= request_end:
            before = request_end
            request += 1
