"""Fill a ring of key or value tiles by `cp.async`, row by row, for pages that TMA cannot read.

A TMA box is the rows of one page, so pages of a few rows take too many boxes. Here each thread
copies 16 bytes at a time and looks the page of its row up by itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnlib.ops.triton.hopper.kernels.compat import (
    Value,
    aggregate,
    arrive_after_copies,
    copy_to_shared,
    prefetch_l1,
)

__all__ = ["GATHER_THREADS", "RequestRows"]

GATHER_THREADS = 128
"""Threads of a partition that gathers: the arrivals that its `full` barriers count."""

_ELEMENTS = gl.constexpr(8)
"""Elements of 16 bits that a thread copies at a time."""

_BYTE_POINTER = gl.constexpr(gl.pointer_type(gl.uint8))


@gluon.jit
def _multiple(stride):
    """Return a stride in bytes, marked as a multiple of 16: the compiler sees that its low bits are
    0, and copies 16 bytes at a time."""
    return _wide((stride >> 4) << 4)


@gluon.jit
def _wide(number):
    """Return a number that is not negative in 64 bits. The compiler knows the upper half of one of
    32 bits to be 0, and multiplies two of them by one instruction."""
    if number.dtype.primitive_bitwidth == 32:
        number = number.to(gl.uint32)
    return number.to(gl.int64)


@aggregate
class RequestRows:
    """The keys or the values of a request and KV head, whose rows are gathered.

    Fields:
        cache: pointer to the cache [B, N, Hkv, D], in words of 16 bits or of float8.
        table: the request's row of the block table.
        seq_len: keys of the request.
        kv_head: KV head.
        stride_b, stride_n, stride_h: strides of blocks, rows and heads, in bytes, multiples of 16.
            They are no constants, because they change at every token of a cache that is one
            growing tensor.
        D: words of 16 bits of a head.
        BLOCK_SIZE: positions of a page.
    """

    cache: Value
    table: Value
    seq_len: Value
    kv_head: Value
    stride_b: Value
    stride_n: Value
    stride_h: Value
    D: gl.constexpr
    BLOCK_SIZE: gl.constexpr

    @gluon.jit
    def load(self, ring, step, tile, later_tile):
        """Issue the copies of a tile as tile number `step` of a ring. 4 warps.

        Rows past the sequence's end and columns past the head size become 0.

        Args:
            ring: `Ring` whose `full` barriers count GATHER_THREADS arrivals.
            tile: number of the tile in the request, in units of BLOCK_N positions.
            later_tile: a tile that a later step needs.
        """
        BLOCK_N: gl.constexpr = ring.memory.shape[1]
        # Block numbers of a later tile are prefetched, one lane per line.
        LINES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        ahead = later_tile * BLOCK_N + gl.arange(0, 32 * gl.num_warps(), LINES)
        prefetch_l1(
            self.table + gl.maximum(gl.minimum(ahead, self.seq_len - 1), 0) // self.BLOCK_SIZE
        )
        stage = step % ring.STAGES
        # Wait until all consumers have released the tile that the stage held STAGES steps ago. The
        # parity is inverted, so that the first pass over the ring does not wait.
        mbarrier.wait(ring.empty.index(stage), ((step // ring.STAGES) & 1) ^ 1)
        # Only the last tile has rows to leave out; copies without a mask take fewer instructions.
        if (tile + 1) * BLOCK_N <= self.seq_len:
            self._copy(ring.memory.index(stage), tile, True)
        else:
            self._copy(ring.memory.index(stage), tile, False)
        arrive_after_copies(ring.full.index(stage), increment_count=False)

    @gluon.jit
    def _copy(self, buffer, tile, ALL: gl.constexpr):
        """Issue the copies of a tile. ALL: no row is past the end."""
        BLOCK_N: gl.constexpr = buffer.shape[0]
        WIDTH: gl.constexpr = buffer.shape[1]
        # A warp copies 128 bytes of 4 rows at a time. Other parts of a row are at constant offsets
        # from the first one, and need no address of their own.
        LANES: gl.constexpr = min(8, WIDTH // _ELEMENTS)
        LAYOUT: gl.constexpr = gl.BlockedLayout(
            [1, _ELEMENTS], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
        )
        columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
        positions = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
        exists = positions < self.seq_len
        if ALL:
            page = gl.load(self.table + positions // self.BLOCK_SIZE)
        else:
            page = gl.load(self.table + positions // self.BLOCK_SIZE, mask=exists, other=0)
        first = self.cache.to(_BYTE_POINTER, bitcast=True) + _wide(self.kv_head) * _multiple(
            self.stride_h
        )
        offsets = _wide(page) * _multiple(self.stride_b)
        if self.BLOCK_SIZE > 1:
            offsets += _wide(positions % self.BLOCK_SIZE) * _multiple(self.stride_n)
        # Pointers count elements of 2 bytes, so offsets are halved, which the compiler drops. One
        # instruction multiplies a page and adds the address of the thread's columns.
        gl.static_assert(buffer.dtype.primitive_bitwidth == 16)
        start = first.to(gl.pointer_type(buffer.dtype), bitcast=True) + columns
        pointers = start + (offsets >> 1)[:, None]
        if ALL and self.D == WIDTH:
            copy_to_shared(buffer, pointers)
        else:
            copy_to_shared(buffer, pointers, mask=exists[:, None] & (columns < self.D))
