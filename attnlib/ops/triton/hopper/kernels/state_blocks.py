"""Triangular matrices [32, 32] of a chunk: sums, inverse, memory (`state_channel_chunks`).

They are in float32, and consist of four blocks [16, 16], of which the one above the diagonal is 0;
the others are tuples here: the first on the diagonal, the one below, and the last on the diagonal.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.state_pieces import parts_of
from attnlib.ops.triton.kernels.state_arguments import numbers

__all__ = ["SIZE", "SPAN", "allocate_sums", "invert", "load_blocks", "store_matrix", "store_sums"]

SIZE: gl.constexpr = gl.constexpr(16)
"""Rows and columns of a block."""
SPAN: gl.constexpr = gl.constexpr(32)
"""Channels of a warp."""
_FLAT: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def _solve_layout(warps):
    """[2, 16, 16]: each thread has a column."""
    return gl.BlockedLayout([1, 16, 1], [2, 1, 16], [1, 1, warps], [2, 1, 0])


@gluon.constexpr_function
def _solved_row_layout(warps):
    """[1, 32]: each thread has the half of its column of `_solve_layout`."""
    copies = [[0, 0]] * (warps.bit_length() - 1)
    lanes = [[0, 0]] * 4 + [[0, 16]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8]], lanes, copies, [], [1, 32])


@gluon.jit
def allocate_sums(CONFIG: gl.constexpr):
    """Return shared memory for the blocks of each warp."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [CONFIG.PART // SPAN * 4 * SIZE, SIZE], LAYOUT)


@gluon.jit
def store_sums(memory, which: gl.constexpr, x):
    """Store a block of each warp, [WARPS, 16, 16]."""
    ROWS: gl.constexpr = x.shape[0] * SIZE
    memory.slice(which * ROWS, ROWS).store(x.reshape([ROWS, SIZE]))


@gluon.jit
def _load_block(memory, which: gl.constexpr):
    """Return the sum of a block over the warps, with 0 above the diagonal."""
    WARPS: gl.constexpr = memory.shape[0] // (4 * SIZE)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [WARPS, 1], [1, 0])
    total = memory.slice(which * WARPS * SIZE, SIZE).load(LAYOUT)
    for warp in gl.static_range(1, WARPS):
        total += memory.slice((which * WARPS + warp) * SIZE, SIZE).load(LAYOUT)
    if which != 1:
        row = gl.arange(0, SIZE, gl.SliceLayout(1, LAYOUT))[:, None]
        column = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
        total = gl.where(row >= column, total, 0.0)
    return total


@gluon.jit
def load_blocks(memory):
    """Return the sums over the warps."""
    return [_load_block(memory, which) for which in numbers(3)]


@gluon.jit
def store_matrix(place, blocks):
    """Store blocks as a matrix in two parts of bfloat16, one after the other."""
    LAYOUT: gl.constexpr = blocks[0].type.layout
    row = gl.arange(0, SIZE, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
    places = place + (row * (2 * SIZE))[:, None] + column[None, :]
    every = (blocks[0], gl.zeros_like(blocks[0]), blocks[1], blocks[2])
    for which in gl.static_range(4):
        high, low = parts_of(every[which])
        block = places + (which // 2 * 2 * SIZE * SIZE + which % 2 * SIZE)
        gl.store(block, high)
        gl.store(block + 4 * SIZE * SIZE, low)


@gluon.jit
def _multiply_blocks(a, b, LAYOUT: gl.constexpr):
    """Return a b of two blocks in shared memory."""
    acc = gl.zeros([SIZE, SIZE], gl.float32, LAYOUT)
    for m in gl.static_range(SIZE):
        x, _ = gl.broadcast(a.slice(m, 1, 1).load(LAYOUT), acc)
        y, _ = gl.broadcast(b.slice(m, 1, 0).load(LAYOUT), acc)
        acc = gl.fma(x, y, acc)
    return acc


@gluon.jit
def _solve(negated):
    """Return (I - a)^-1 of the two matrices a [16, 16] below their diagonals whose columns are the
    rows of `negated` [16, 32], as [2, 16, 16]: each thread solves for a column."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = _solve_layout(WARPS)
    row = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    column = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    x = gl.zeros([2, SIZE, SIZE], gl.float32, LAYOUT)
    x = gl.where(row == column, 1.0, x)
    for m in gl.static_range(SIZE - 1):
        a = negated.slice(m, 1, 0).load(_solved_row_layout(WARPS)).reshape([2, SIZE])
        a = gl.convert_layout(a, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
        # Sums of integers with one term that is not 0 take no instructions.
        solved = gl.sum(gl.where(row == m, x.to(gl.int32, bitcast=True), 0), 1)
        a, _ = gl.broadcast(a[:, :, None], x)
        solved, _ = gl.broadcast(solved.to(gl.float32, bitcast=True)[:, None, :], x)
        x = gl.where(row > m, gl.fma(a, solved, x), x)
    return x


@gluon.jit
def invert(a):
    """Return (I + a)^-1 of the part of a matrix below the diagonal."""
    first, below, last = a
    LAYOUT: gl.constexpr = first.type.layout
    negated = gl.allocate_shared_memory(gl.float32, [SIZE, 2 * SIZE], _FLAT)
    negated.slice(0, SIZE, 1).store((first * -1.0).permute((1, 0)))
    negated.slice(SIZE, SIZE, 1).store((last * -1.0).permute((1, 0)))
    joined = gl.allocate_shared_memory(gl.float32, [SIZE, SIZE], _FLAT)
    joined.store(below * -1.0)
    inverse = gl.allocate_shared_memory(gl.float32, [2 * SIZE, SIZE], _FLAT)
    inverse.store(_solve(negated).reshape([2 * SIZE, SIZE]))
    first, last = inverse.slice(0, SIZE), inverse.slice(SIZE, SIZE)
    product = gl.allocate_shared_memory(gl.float32, [SIZE, SIZE], _FLAT)
    product.store(_multiply_blocks(joined, first, LAYOUT))
    return first.load(LAYOUT), _multiply_blocks(last, product, LAYOUT), last.load(LAYOUT)
