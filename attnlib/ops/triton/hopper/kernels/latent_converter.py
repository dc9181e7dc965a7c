"""The warps that convert 8-bit latents for two consumer warpgroups of 64 query rows each.

Two tiles of 16 bits fill the shared memory, which leaves no room for their bytes. Four warps load
these into registers, up to three quarters of a tile ahead, and convert them once the consumers have
released the shared memory of the tile before. So the next tile follows without the latency of the
L2 cache, to which the pair of tiles after it is on the way. Consumers multiply elements in the
dtype of the queries: those with one scale are exact, and those with a scale for each quarter are
multiplied by it and rounded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    partition_barrier,
    prefetch_rows,
)
from attnlib.ops.triton.hopper.kernels.latent_splits import split_at
from attnlib.ops.triton.hopper.kernels.latent_tiles import HIGH, LOADS, LOW, ROTARY_PART, TILE
from attnlib.ops.triton.hopper.kernels.quantized import float16_pairs, split_pairs

__all__ = ["convert_range"]

_SCALES: gl.constexpr = gl.constexpr(256)
_PACKED_ROTARY: gl.constexpr = gl.constexpr(264)
"""Where the scales and the bfloat16 elements of packed latents begin, in 16-bit words (P14)."""
_WORDS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
"""Layout of the words of a quarter, in which four threads read 64 bytes of a latent. The 16-bit
elements of eight threads lie in different banks."""
_ROW: gl.constexpr = gl.constexpr(gl.SliceLayout(1, _WORDS))


@aggregate
class _Bytes:
    """An 8-bit cache of latents.

    Fields:
        words: int16 pointer to the elements of the values of the first latent.
        stride_block, stride_token: in words.
        config: the `LatentConfig`.
    """

    words: Value
    stride_block: Value
    stride_token: Value
    config: Value

    @gluon.jit
    def rows(self, pages, positions, end):
        """Return (offsets in words, whether it exists) of the latents at these positions; those
        from `end` on do not."""
        column = (positions.to(gl.uint32) // pages.BLOCK_SIZE).to(gl.int32)
        block = gl.load(pages.row + column, mask=positions < end, other=-1)
        inside = (block >= 0) & (block < pages.num_blocks)
        offsets = block.to(gl.int64) * self.stride_block
        offsets += positions % pages.BLOCK_SIZE * self.stride_token
        # The launcher checks 16-byte alignment; the shifts tell the compiler.
        return (offsets >> 3) << 3, inside

    @gluon.jit
    def tile_rows(self, pages, tile, end):
        """Return the `rows` of a tile."""
        return self.rows(pages, tile * TILE + gl.arange(0, TILE, _ROW), end)

    @gluon.jit
    def load(self, rows, FIRST: gl.constexpr, COUNT: gl.constexpr):
        """Load words FIRST and following of the latents of a tile; 0 where there are none."""
        offsets, inside = rows
        columns = FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, _WORDS))
        pointers = self.words + offsets[:, None] + columns[None, :]
        return gl.load(pointers, mask=inside[:, None], other=0)

    @gluon.jit
    def load_quarter(self, rows, QUARTER: gl.constexpr):
        """Return (words of a quarter of the latents of a tile, its scales if there are any)."""
        WIDTH: gl.constexpr = self.config.DV // 8
        loaded = (self.load(rows, QUARTER * WIDTH, WIDTH),)
        if self.config.GROUP_SCALES:
            offsets, inside = rows
            numbers = self.words.to(gl.pointer_type(gl.float32), bitcast=True)
            place = offsets // 2 + (_SCALES // 2 + QUARTER)
            loaded = loaded + (gl.load(numbers + place, mask=inside, other=0.0),)
        return loaded

    @gluon.jit
    def load_rotary(self, rows):
        """Load the words of the other elements of a tile."""
        if self.config.GROUP_SCALES:
            return self.load(rows, _PACKED_ROTARY, self.config.ROTARY)
        else:
            return self.load(rows, self.config.DV // 2, self.config.ROTARY // 2)

    @gluon.jit
    def prefetch(self, pages, pair, end):
        """Prefetch a pair of tiles into the L2 cache where latents are adjacent."""
        BOX: gl.constexpr = min(pages.BLOCK_SIZE, 32)
        ROW: gl.constexpr = (
            _PACKED_ROTARY + self.config.ROTARY
            if self.config.GROUP_SCALES
            else (self.config.DV + self.config.ROTARY) // 2
        )
        number = gl.arange(0, 2 * TILE, gl.BlockedLayout([1], [32], [4], [0]))
        offsets, inside = self.rows(pages, pair * (2 * TILE) + number, end)
        first = inside & (number % BOX == 0) & (self.stride_token == ROW)
        prefetch_rows(self.words + offsets, BOX * ROW * 2, first)


@gluon.jit
def _bytes_of(cache, CONFIG: gl.constexpr):
    """Return the `_Bytes` of a `LatentCache`."""
    words = cache.latents.to(gl.pointer_type(gl.int16), bitcast=True)
    if CONFIG.GROUP_SCALES:
        return _Bytes(words - _PACKED_ROTARY, cache.stride_latents, cache.stride_token, CONFIG)
    else:
        return _Bytes(words, cache.stride_latents // 2, cache.stride_token // 2, CONFIG)


@gluon.jit
def _publish(target, elements, full):
    """Store elements of a tile for the consumers."""
    target.store(elements)
    # WGMMA reads shared memory through the async proxy: fence, then wait for all warps.
    fence_async_shared()
    partition_barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _store_quarter(loaded, tiles, CONFIG: gl.constexpr, INDEX: gl.constexpr, QUARTER: gl.constexpr):
    """Convert quarter 0 to 3 of tile A or B."""
    target = tiles.latents.part(LOW + QUARTER // 2).index(INDEX)
    WIDTH: gl.constexpr = target.shape[1] // 2
    target = target.slice(QUARTER % 2 * WIDTH, WIDTH, 1)
    elements = split_pairs(float16_pairs(loaded[0], CONFIG.KV_KIND))
    if CONFIG.GROUP_SCALES:
        # An infinite one becomes NaN: a score of -inf would hide the latent.
        scales = loaded[1] + loaded[1] * 0.0
        scales = gl.convert_layout(scales, gl.SliceLayout(1, elements.type.layout))
        elements = elements.to(gl.float32) * scales[:, None]
    if elements.dtype != target.dtype:
        elements = elements.to(gl.float32).to(target.dtype)
    _publish(target, elements, tiles.full.index(INDEX * LOADS + 1 + QUARTER))


@gluon.jit
def _store_rotary(words, tiles, CONFIG: gl.constexpr, INDEX: gl.constexpr):
    """Convert the other elements of tile A or B."""
    target = tiles.latents.rotary.index(INDEX)
    if CONFIG.GROUP_SCALES:
        elements = words.to(gl.bfloat16, bitcast=True)
    else:
        elements = split_pairs(float16_pairs(words, CONFIG.KV_KIND))
    if elements.dtype != target.dtype:
        elements = elements.to(gl.float32).to(target.dtype)
    _publish(target, elements, tiles.full.index(INDEX * LOADS))


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
        cache.prefetch(pages, begin, end)
    rows = cache.tile_rows(pages, 2 * begin, end)
    rotary = cache.load_rotary(rows)
    first = cache.load_quarter(rows, 0)
    for i in range(0, split.count):
        pair = begin + i
        # Nothing after the split is loaded.
        next_end = gl.where(i + 1 < split.count, end, 0)
        if block == 0:
            cache.prefetch(pages, pair + 1, next_end)
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
    stored = _bytes_of(cache, CONFIG)
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
