"""The warp that loads pairs of tiles of latents for two consumer warpgroups.

The shared memory holds two tiles, so that a tile is requested only when its predecessor is used up.
Where several CTAs read the same latents, one of them prefetches each tile into the L2 cache, one
tile before. Prefetches of other batches were slower, as were those of blocks of 16 tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.latent_pages import load_part
from attnlib.ops.triton.hopper.kernels.latent_splits import split_at
from attnlib.ops.triton.hopper.kernels.latent_tiles import HIGH, LOADS, LOW, ROTARY_PART, half_load

__all__ = ["load_range"]


@gluon.jit
def _load_half(cache, blocks, offset, tiles, parity, INDEX: gl.constexpr, PART: gl.constexpr):
    """Issue the TMA loads of half PART of the value elements of a tile, in two loads."""
    tiles.wait_free(PART, parity, INDEX)
    target = tiles.latents.part(PART).index(INDEX)
    QUARTER: gl.constexpr = target.shape[1] // 2
    for quarter in gl.static_range(2):
        load_part(
            cache.value_desc,
            blocks,
            offset,
            target.slice(quarter * QUARTER, QUARTER, 1),
            tiles.full.index(INDEX * LOADS + half_load(PART, quarter)),
            half_load(PART, quarter) * QUARTER - QUARTER,
        )


@gluon.jit
def _load_tile(cache, blocks, offset, tiles, parity, INDEX: gl.constexpr):
    """Issue the TMA loads of tile A or B, each part as soon as its memory is free."""
    START: gl.constexpr = 2 * tiles.latents.low.shape[2]
    tiles.wait_free(ROTARY_PART, parity, INDEX)
    target = tiles.latents.rotary.index(INDEX)
    load_part(cache.key_desc, blocks, offset, target, tiles.full.index(INDEX * LOADS), START)
    # First the half that the owner of the tile multiplies by its own weights.
    _load_half(cache, blocks, offset, tiles, parity, INDEX, LOW + INDEX)
    _load_half(cache, blocks, offset, tiles, parity, INDEX, HIGH - INDEX)


@gluon.jit
def _load_split(cache, pages, split, block, tiles, step, PREFETCH: gl.constexpr):
    """Load all pairs of tiles of a split; returns the number of pairs so far.

    Args:
        step: number of pairs before the split.
        PREFETCH: the CTA of the first block of query rows prefetches tiles into the L2 cache.
    """
    ROW: gl.constexpr = 2 * tiles.latents.low.shape[2] + tiles.latents.rotary.shape[2]
    first = split.first()
    for i in range(0, split.count):
        # Blocks are loaded before the waits for free parts.
        number = 2 * (first + i)
        blocks_a = pages.blocks(number)
        blocks_b = pages.blocks(number + 1)
        offset_a = pages.offset(number)
        offset_b = pages.offset(number + 1)
        if PREFETCH and block == 0:
            cache.prefetch(blocks_b, offset_b, ROW)
        # The parity is inverted, so that the first use of a part does not wait.
        parity = (step & 1) ^ 1
        _load_tile(cache, blocks_a, offset_a, tiles, parity, 0)
        if PREFETCH and (block == 0) & (i + 1 < split.count):
            blocks = pages.blocks(number + 2)
            offset = pages.offset(number + 2)
            cache.prefetch(blocks, offset, ROW)
        _load_tile(cache, blocks_b, offset_b, tiles, parity, 1)
        step += 1
    return step


@gluon.jit
def load_range(cache, keys, own, block, tiles, PREFETCH: gl.constexpr):
    """Load all pairs of tiles of the CTA's range. One warp.

    Args:
        cache: the `LatentCache`.
        keys: the `KeyTiles`, in pairs of tiles.
        own: the `TileRange` of the CTA.
        block: its block of query rows.
        tiles: the `LatentTiles`.
        PREFETCH: the CTA of the first block of query rows prefetches tiles into the L2 cache.
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
            step = _load_split(cache, pages, split, block, tiles, step, PREFETCH)
            position += split.count
        if position >= request_end:
            before = request_end
            request += 1
