"""The warps that convert 8-bit latents for two consumer warpgroups of 64 query rows each.

Two tiles of 16 bits fill the shared memory, which leaves no room for their bytes. Four warps load
these into registers, up to three quarters of a tile ahead, and convert them once the consumers have
released the shared memory of the tile before. So the next tile follows without the latency of the
L2 cache, to which the pair of tiles after it is on the way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.latent_splits import split_at
from attnlib.ops.triton.hopper.kernels.latent_stored import (
    publish,
    quarter_elements,
    rotary_elements,
    stored_latents,
)
from attnlib.ops.triton.hopper.kernels.latent_tiles import HIGH, LOADS, LOW, ROTARY_PART, TILE

__all__ = ["convert_range"]


@gluon.jit
def _store_quarter(loaded, tiles, CONFIG: gl.constexpr, INDEX: gl.constexpr, QUARTER: gl.constexpr):
    """Convert quarter 0 to 3 of tile A or B."""
    target = tiles.latents.part(LOW + QUARTER // 2).index(INDEX)
    WIDTH: gl.constexpr = target.shape[1] // 2
    target = target.slice(QUARTER % 2 * WIDTH, WIDTH, 1)
    elements = quarter_elements(loaded, target.dtype, CONFIG)
    publish(target, elements, tiles.full.index(INDEX * LOADS + 1 + QUARTER))


@gluon.jit
def _store_rotary(words, tiles, CONFIG: gl.constexpr, INDEX: gl.constexpr):
    """Convert the other elements of tile A or B."""
    target = tiles.latents.rotary.index(INDEX)
    elements = rotary_elements(words, target.dtype, CONFIG)
    publish(target, elements, tiles.full.index(INDEX * LOADS))


@gluon.jit
def _convert_tile(cache, rows, next_rows, rotary, first, tiles, parity, INDEX: gl.constexpr):
    """Convert tile A or B, each part as soon as its memory is free.

    Args:
        rows, next_rows: of the tile and of the one after it.
        rotary, first: words of the tile that have been loaded: those of the elements after the
            values, and of its first quarter.
        parity: of the number of pairs, inverted.

    Returns:
        (rotary, first) of the tile after it.
    """
    CONFIG: gl.constexpr = cache.config
    # First the half that the owner of the tile multiplies by its own weights.
    OWN: gl.constexpr = 2 * INDEX
    OTHER: gl.constexpr = 2 - OWN
    second = cache.load_quarter(rows, OWN + 1)
    tiles.wait_free(ROTARY_PART, parity, INDEX)
    _store_rotary(rotary, tiles, CONFIG, INDEX)
    third = cache.load_quarter(rows, OTHER)
    tiles.wait_free(LOW + INDEX, parity, INDEX)
    _store_quarter(first, tiles, CONFIG, INDEX, OWN)
    fourth = cache.load_quarter(rows, OTHER + 1)
    _store_quarter(second, tiles, CONFIG, INDEX, OWN + 1)
    rotary = cache.load_rotary(next_rows)
    tiles.wait_free(HIGH - INDEX, parity, INDEX)
    _store_quarter(third, tiles, CONFIG, INDEX, OTHER)
    first = cache.load_quarter(next_rows, OTHER)
    _store_quarter(fourth, tiles, CONFIG, INDEX, OTHER + 1)
    return rotary, first


@gluon.jit
def _convert_split(cache, pages, split, block, tiles, step):
    """Convert all pairs of tiles of a split; returns the number of pairs so far.

    Args:
        block: of query rows; the CTAs of the first one prefetch for all.
        step: number of pairs before the split.
    """
    begin = split.first()
    end = split.seq_len
    if block == 0:
        cache.prefetch(pages, begin * (2 * TILE), 2 * TILE, end)
    rows = cache.tile_rows(pages, 2 * begin, end)
    rotary = cache.load_rotary(rows)
    first = cache.load_quarter(rows, 0)
    for i in range(0, split.count):
        pair = begin + i
        # Nothing after the split is loaded.
        next_end = gl.where(i + 1 < split.count, end, 0)
        if block == 0:
            cache.prefetch(pages, (pair + 1) * (2 * TILE), 2 * TILE, next_end)
        # The parity is inverted, so that the first use of a part does not wait.
        parity = (step & 1) ^ 1
        rows_b = cache.tile_rows(pages, 2 * pair + 1, end)
        rotary, first = _convert_tile(cache, rows, rows_b, rotary, first, tiles, parity, 0)
        rows = cache.tile_rows(pages, 2 * pair + 2, next_end)
        rotary, first = _convert_tile(cache, rows_b, rows, rotary, first, tiles, parity, 1)
        step += 1
    return step


@gluon.jit
def convert_range(cache, keys, own, block, tiles, CONFIG: gl.constexpr):
    """Load and convert all pairs of tiles of the CTA's range. Four warps.

    Arguments as of `latent_loader.load_range`; the `LatentCache` has strides of blocks and tokens.
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
            step = _convert_split(stored, pages, split, block, tiles, step)
            position += split.count
        if position >= request_end:
            before = request_end
            request += 1
