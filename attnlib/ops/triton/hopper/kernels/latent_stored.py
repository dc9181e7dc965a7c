"""8-bit latents that four warps load by address and convert to 16 bits (P10, P14).

Elements with one scale are exact, and those with a scale for each quarter are multiplied by it and
rounded.
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
from attnlib.ops.triton.hopper.kernels.latent_tiles import TILE
from attnlib.ops.triton.hopper.kernels.quantized import float16_pairs, split_pairs

__all__ = ["StoredLatents", "publish", "quarter_elements", "rotary_elements", "stored_latents"]

_SCALES: gl.constexpr = gl.constexpr(256)
_PACKED_ROTARY: gl.constexpr = gl.constexpr(264)
"""Where the scales and the bfloat16 elements of packed latents begin, in 16-bit words (P14)."""
_WORDS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
"""Layout of the words of a quarter, in which four threads read 64 bytes of a latent. The 16-bit
elements of eight threads lie in different banks."""
_ROW: gl.constexpr = gl.constexpr(gl.SliceLayout(1, _WORDS))


@aggregate
class StoredLatents:
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
        if self.config.STORED_GROUPS:
            offsets, inside = rows
            numbers = self.words.to(gl.pointer_type(gl.float32), bitcast=True)
            place = offsets // 2 + (_SCALES // 2 + QUARTER)
            loaded = loaded + (gl.load(numbers + place, mask=inside, other=0.0),)
        return loaded

    @gluon.jit
    def load_rotary(self, rows):
        """Load the words of the other elements of a tile."""
        if self.config.STORED_GROUPS:
            return self.load(rows, _PACKED_ROTARY, self.config.ROTARY)
        else:
            return self.load(rows, self.config.DV // 2, self.config.ROTARY // 2)

    @gluon.jit
    def prefetch(self, pages, begin, COUNT: gl.constexpr, end):
        """Prefetch COUNT latents from position `begin` on, none from `end` on, into the L2 cache if
        they are adjacent."""
        BOX: gl.constexpr = min(pages.BLOCK_SIZE, 32)
        ROW: gl.constexpr = (
            _PACKED_ROTARY + self.config.ROTARY
            if self.config.STORED_GROUPS
            else (self.config.DV + self.config.ROTARY) // 2
        )
        number = gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [4], [0]))
        offsets, inside = self.rows(pages, begin + number, end)
        first = inside & (number % BOX == 0) & (self.stride_token == ROW)
        prefetch_rows(self.words + offsets, BOX * ROW * 2, first)


@gluon.jit
def stored_latents(cache, CONFIG: gl.constexpr):
    """Return the `StoredLatents` of a `LatentCache`."""
    words = cache.latents.to(gl.pointer_type(gl.int16), bitcast=True)
    if CONFIG.STORED_GROUPS:
        words = words - _PACKED_ROTARY
        return StoredLatents(words, cache.stride_latents, cache.stride_token, CONFIG)
    else:
        return StoredLatents(words, cache.stride_latents // 2, cache.stride_token // 2, CONFIG)


@gluon.jit
def quarter_elements(loaded, DTYPE: gl.constexpr, CONFIG: gl.constexpr):
    """Convert a quarter of a tile, as `StoredLatents.load_quarter` returns it."""
    elements = split_pairs(float16_pairs(loaded[0], CONFIG.STORED_KIND))
    if CONFIG.STORED_GROUPS:
        # An infinite one becomes NaN: a score of -inf would hide the latent.
        scales = loaded[1] + loaded[1] * 0.0
        scales = gl.convert_layout(scales, gl.SliceLayout(1, elements.type.layout))
        elements = elements.to(gl.float32) * scales[:, None]
    if elements.dtype != DTYPE:
        elements = elements.to(gl.float32).to(DTYPE)
    return elements


@gluon.jit
def rotary_elements(words, DTYPE: gl.constexpr, CONFIG: gl.constexpr):
    """Convert the other elements of a tile."""
    if CONFIG.STORED_GROUPS:
        elements = words.to(gl.bfloat16, bitcast=True)
    else:
        elements = split_pairs(float16_pairs(words, CONFIG.STORED_KIND))
    if elements.dtype != DTYPE:
        elements = elements.to(gl.float32).to(DTYPE)
    return elements


@gluon.jit
def publish(target, elements, full):
    """Store elements of a tile in shared memory for the consumers. Four warps."""
    target.store(elements)
    # WGMMA reads shared memory through the async proxy: fence, then wait for all warps.
    fence_async_shared()
    partition_barrier()
    mbarrier.arrive(full, count=1)
