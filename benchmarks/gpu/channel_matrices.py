"""Chunks of long steps with decays per channel: a candidate for `long_matrices_kernel` on Hopper.

For layers that are not batch-invariant, whose chunks have 32 tokens, and key sizes of 64 and 128.
It is the choice `channels` of `benchmarks.gpu.state_tiles`.

With b the sums of the decays up to each token, of each channel, a product of two tokens i > j is
the sum over the channels of k_i k_j exp(b_i - b_j). A border r between them divides the factor
between the operands: exp(b_i - r) exp(r - b_j). Tokens of two halves of a chunk have a border
between them, so that no exponent is positive. Where the decays of a half are so weak that both
exponents are bounded, one product with its middle as the border gives all pairs in it. Otherwise
its blocks of 2, 4, ... tokens are joined as in `state_matrices`.

Each warp multiplies 32 channels. Its threads hold operands as they load them: left and right ones
are the same numbers of the same threads. Matrices of pairs of rows are in float32, and consist of
four blocks [16, 16], of which the one above the diagonal is 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from attnlib.ops.triton.hopper.kernels.state_long import (
    factor_size,
    long_matrices_kernel,
    plane_size,
)
from attnlib.ops.triton.hopper.kernels.state_pieces import count_chunks, open_part, parts_of
from attnlib.ops.triton.kernels.state_arguments import (
    DECAY_CHANNEL,
    UNALIGNED,
    StateBatch,
    Tail,
    Tokens,
)
from attnlib.ops.triton.kernels.state_requests import load_base, open_head, open_request, open_tail
from attnlib.ops.triton.kernels.state_sums import summable
from attnlib.ops.triton.states.launch import KernelLaunch

__all__ = ["ChannelLaunch", "channel_matrices_kernel"]

_SIZE: gl.constexpr = gl.constexpr(16)
"""Rows and columns of a block."""
_SPAN: gl.constexpr = gl.constexpr(32)
"""Channels of a warp."""
_FLAT: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
_MOST: gl.constexpr = gl.constexpr(40.0 * 1.4426950408889634)
"""Largest binary exponent of a factor: that of bounded gates (-5) over half of 16 tokens. Products
of two do not overflow, and the second number of bfloat16 keeps its bits."""
_SQUARES: gl.constexpr = gl.constexpr(
    "{.reg .f32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, -65536;"
    " mul.f32 $0, a, a; mul.f32 $1, b, b;}"
)
"""Of two numbers of bfloat16 in a register, without other registers for them in float32."""


class Blocks(NamedTuple):
    """Blocks [16, 16] of a triangular matrix: the first and the last on its diagonal, and the one
    below."""

    first: Any
    below: Any
    last: Any


@gluon.constexpr_function
def _block_layout(warps):
    """[16, 16]"""
    return gl.BlockedLayout([1, 2], [4, 8], [warps, 1], [1, 0])


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
def _allocate_sums(CONFIG: gl.constexpr):
    """Return shared memory for the blocks of each warp."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [CONFIG.PART // _SPAN * 4 * _SIZE, _SIZE], LAYOUT)


@gluon.jit
def _store_sums(memory, which: gl.constexpr, x):
    """Store a block of each warp, [WARPS, 16, 16]."""
    ROWS: gl.constexpr = x.shape[0] * _SIZE
    memory.slice(which * ROWS, ROWS).store(x.reshape([ROWS, _SIZE]))


@gluon.jit
def _load_block(memory, which: gl.constexpr):
    """Return the sum of a block over the warps, with 0 above the diagonal."""
    WARPS: gl.constexpr = memory.shape[0] // (4 * _SIZE)
    LAYOUT: gl.constexpr = _block_layout(WARPS)
    total = memory.slice(which * WARPS * _SIZE, _SIZE).load(LAYOUT)
    for warp in gl.static_range(1, WARPS):
        total += memory.slice((which * WARPS + warp) * _SIZE, _SIZE).load(LAYOUT)
    if which != 1:
        row = gl.arange(0, _SIZE, gl.SliceLayout(1, LAYOUT))[:, None]
        column = gl.arange(0, _SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
        total = gl.where(row >= column, total, 0.0)
    return total


@gluon.jit
def _load_blocks(memory):
    """Return the sums over the warps as `Blocks`."""
    return Blocks(_load_block(memory, 0), _load_block(memory, 1), _load_block(memory, 2))


@gluon.jit
def _store_matrix(place, blocks):
    """Store `Blocks` as a matrix [32, 32] in two parts of bfloat16, one after the other."""
    LAYOUT: gl.constexpr = blocks.first.type.layout
    row = gl.arange(0, _SIZE, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, _SIZE, gl.SliceLayout(0, LAYOUT))
    places = place + (row * (2 * _SIZE))[:, None] + column[None, :]
    every = (blocks.first, gl.zeros_like(blocks.first), blocks.below, blocks.last)
    for which in gl.static_range(4):
        high, low = parts_of(every[which])
        block = places + (which // 2 * 2 * _SIZE * _SIZE + which % 2 * _SIZE)
        gl.store(block, high)
        gl.store(block + 4 * _SIZE * _SIZE, low)


@gluon.jit
def _multiply_blocks(a, b, LAYOUT: gl.constexpr):
    """Return a b of two blocks in shared memory."""
    acc = gl.zeros([_SIZE, _SIZE], gl.float32, LAYOUT)
    for m in gl.static_range(_SIZE):
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
    row = gl.arange(0, _SIZE, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    column = gl.arange(0, _SIZE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    x = gl.zeros([2, _SIZE, _SIZE], gl.float32, LAYOUT)
    x = gl.where(row == column, 1.0, x)
    for m in gl.static_range(_SIZE - 1):
        a = negated.slice(m, 1, 0).load(_solved_row_layout(WARPS)).reshape([2, _SIZE])
        a = gl.convert_layout(a, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
        # Sums of integers with one term that is not 0 take no instructions.
        solved = gl.sum(gl.where(row == m, x.to(gl.int32, bitcast=True), 0), 1)
        a, _ = gl.broadcast(a[:, :, None], x)
        solved, _ = gl.broadcast(solved.to(gl.float32, bitcast=True)[:, None, :], x)
        x = gl.where(row > m, gl.fma(a, solved, x), x)
    return x


@gluon.jit
def _invert(a):
    """Return (I + a)^-1 of the part of `Blocks` below the diagonal."""
    LAYOUT: gl.constexpr = a.first.type.layout
    negated = gl.allocate_shared_memory(gl.float32, [_SIZE, 2 * _SIZE], _FLAT)
    negated.slice(0, _SIZE, 1).store((a.first * -1.0).permute((1, 0)))
    negated.slice(_SIZE, _SIZE, 1).store((a.last * -1.0).permute((1, 0)))
    below = gl.allocate_shared_memory(gl.float32, [_SIZE, _SIZE], _FLAT)
    below.store(a.below * -1.0)
    inverse = gl.allocate_shared_memory(gl.float32, [2 * _SIZE, _SIZE], _FLAT)
    inverse.store(_solve(negated).reshape([2 * _SIZE, _SIZE]))
    first, last = inverse.slice(0, _SIZE), inverse.slice(_SIZE, _SIZE)
    product = gl.allocate_shared_memory(gl.float32, [_SIZE, _SIZE], _FLAT)
    product.store(_multiply_blocks(below, first, LAYOUT))
    return Blocks(first.load(LAYOUT), _multiply_blocks(last, product, LAYOUT), last.load(LAYOUT))


@gluon.constexpr_function
def _row_layout(rows, columns):
    """[rows, columns] of operands: a thread has 8 columns of every eighth row."""
    registers = [[0, 1], [0, 2], [0, 4]]
    registers += [[8 << n, 0] for n in range((rows // 8).bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warps = [[0, 32 << n] for n in range((columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns])


@gluon.constexpr_function
def _product_layout(warps):
    """[warps, 16, 16]"""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.jit
def _halves(x):
    """Return the first and the last 16 rows of 32, [32, PART]."""
    LAYOUT: gl.constexpr = _row_layout(_SIZE, x.shape[1])
    first, last = x.reshape([2, _SIZE, x.shape[1]]).permute((1, 2, 0)).split()
    first = gl.convert_layout(first, LAYOUT, assert_trivial=True)
    return first, gl.convert_layout(last, LAYOUT, assert_trivial=True)


@gluon.jit
def _number_halves(x, LAYOUT: gl.constexpr):
    """The same of [32], in the layout of a column of rows."""
    first, last = x.reshape([2, _SIZE]).permute((1, 0)).split()
    first = gl.convert_layout(first, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return first, gl.convert_layout(last, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
def _operand(x, IS_LEFT: gl.constexpr):
    """Return rows [16, PART] of bfloat16 as operands of `_multiply`. The order of channels in a
    product is that in which threads have them."""
    WARPS: gl.constexpr = x.shape[1] // _SPAN
    x = x.reshape([_SIZE, WARPS, 4, 2, _SPAN // 8])
    if IS_LEFT:
        x = x.permute((1, 0, 3, 2, 4)).reshape([WARPS, _SIZE, _SPAN])
    else:
        x = x.permute((1, 3, 2, 4, 0)).reshape([WARPS, _SPAN, _SIZE])
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0 if IS_LEFT else 1, _product_layout(WARPS), 4)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _operands(x, IS_LEFT: gl.constexpr):
    """The same of rows of float32, in two parts."""
    high, low = parts_of(x)
    return _operand(high, IS_LEFT), _operand(low, IS_LEFT)


@gluon.jit
def _multiply(a, b):
    """Return a b^T, [WARPS, 16, 16]; the product of the smaller parts is left out."""
    WARPS: gl.constexpr = a[0].shape[0]
    acc = gl.zeros([WARPS, _SIZE, _SIZE], gl.float32, _product_layout(WARPS))
    return mma_v2(a[0], b[0], mma_v2(a[1], b[0], mma_v2(a[0], b[1], acc)))


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _store_rows(plane, which: gl.constexpr, HALF: gl.constexpr, x, CONFIG: gl.constexpr):
    """Store half of the rows that states are multiplied by, in two parts: those for what a state
    holds of the keys, for outputs, and for the next state."""
    MATRICES: gl.constexpr = 2 if CONFIG.DELTA else 1
    LAYOUT: gl.constexpr = x.type.layout
    row = gl.arange(0, _SIZE, gl.SliceLayout(1, LAYOUT)) + HALF * _SIZE
    column = gl.arange(0, CONFIG.PART, gl.SliceLayout(0, LAYOUT))
    place = plane + 2 * CONFIG.C * (MATRICES * CONFIG.C + which * CONFIG.PART)
    places = place + (row * CONFIG.PART)[:, None] + column[None, :]
    high, low = parts_of(x)
    gl.store(places, high)
    gl.store(places + CONFIG.C * CONFIG.PART, low)


@gluon.jit
def _levels(q, k, beta, total, CONFIG: gl.constexpr):
    """Return the products (q . k, beta k . k) of each pair of 16 rows, with any decays."""
    WARPS: gl.constexpr = CONFIG.PART // _SPAN
    LAYOUT: gl.constexpr = _product_layout(WARPS)
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    row = gl.arange(0, _SIZE, ROW)[None, :, None]
    column = gl.arange(0, _SIZE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    own = gl.convert_layout(gl.sum(q * k, 1), ROW)[None, :, None]
    kk = gl.zeros([WARPS, _SIZE, _SIZE], gl.float32, LAYOUT)
    qk = gl.where((row == column) & (warp == 0), own, kk)
    token = gl.arange(0, _SIZE, gl.SliceLayout(1, total.type.layout))[:, None]
    channel = gl.arange(0, CONFIG.PART, gl.SliceLayout(0, total.type.layout))[None, :]
    for level in range(4):
        # The row before the middle of each block of 2 << level rows, at each of its rows.
        border = (token >> (level + 1) << (level + 1)) + (1 << level) - 1
        gap = total - gl.gather(total, border + channel * 0, 0)
        # Pairs whose factors this limits are those of another level.
        grown = _exp2(gl.minimum(gap, _MOST))
        right = _operands(k * _exp2(gl.minimum(gap * -1.0, _MOST)), False)
        joined = ((row >> level) & 1 == 1) & ((row >> level) - 1 == (column >> level))
        qk += gl.where(joined, _multiply(_operands(q * grown, True), right), 0.0)
        if CONFIG.DELTA:
            left = _operands(k * beta[:, None] * grown, True)
            kk += gl.where(joined, _multiply(left, right), 0.0)
    return qk, kk


@gluon.jit
def _borders(sums, vector, CONFIG: gl.constexpr):
    """Store the decays of the state of a chunk. Return vectors [PART] in shared memory: the sums up
    to the end of each eighth token and, for each half with its middle as the border, the decays up
    to there, from there to the end, and between there and the other half; and whether decays are
    so weak that halves have one border."""
    PART: gl.constexpr = CONFIG.PART
    CHANNEL: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row = gl.arange(0, CONFIG.C, gl.SliceLayout(1, sums.type.layout))[:, None]
    vectors = gl.allocate_shared_memory(gl.float32, [16 * PART], FLAT)
    ends = ()
    for part in gl.static_range(4):
        ends = ends + (gl.sum(gl.where(row == 8 * part + 7, sums, 0.0), 0),)
        vectors.slice(part * PART, PART).store(ends[part])
    for half in gl.static_range(2):
        border = ends[2 * half]
        between = ends[half + 1] - ends[half]
        vectors.slice((3 * half + 4) * PART, PART).store(_exp2(border))
        vectors.slice((3 * half + 5) * PART, PART).store(_exp2(ends[3] - border))
        vectors.slice((3 * half + 6) * PART, PART).store(_exp2(between))
    gl.store(vector + CONFIG.C + gl.arange(0, PART, CHANNEL), _exp2(ends[3]))
    least = gl.minimum(gl.minimum(ends[0], ends[1] - ends[0]), ends[2] - ends[1])
    return vectors, gl.min(gl.minimum(least, ends[3] - ends[2]), 0) >= -_MOST


@gluon.jit
def _load_vector(vectors, which: gl.constexpr, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    part = vectors.slice(which * CONFIG.PART, CONFIG.PART)
    return part.load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _half(
    HALF: gl.constexpr, q, k, beta, total, vectors, is_weak, plane, pairs, CONFIG: gl.constexpr
):
    """Store rows of a half and the products of its pairs. Return its rows for products with the
    other half, those of keys and of queries: right operands of the first half, left ones of the
    last."""
    LAYOUT: gl.constexpr = total.type.layout
    VECTOR: gl.constexpr = 3 * HALF + 4
    if is_weak:
        gap = total - _load_vector(vectors, 2 * HALF, LAYOUT, CONFIG)
        right, grown = k * _exp2(gap * -1.0), _exp2(gap)
        after = _load_vector(vectors, VECTOR + 1, LAYOUT, CONFIG)
        _store_rows(plane, 2, HALF, right * after, CONFIG)
        operands = _operands(right, False)
        before = _load_vector(vectors, VECTOR, LAYOUT, CONFIG)
        query, key = q * grown, right
        _store_rows(plane, 1, HALF, query * before, CONFIG)
        _store_sums(pairs[0], 2 * HALF, _multiply(_operands(query, True), operands))
        if CONFIG.DELTA:
            key = k * beta[:, None] * grown
            _store_rows(plane, 0, HALF, key * before, CONFIG)
            _store_sums(pairs[1], 2 * HALF, _multiply(_operands(key, True), operands))
        if HALF == 0:
            key = right
        between = _load_vector(vectors, VECTOR + 2, LAYOUT, CONFIG)
        key, query = key * between, query * between
    else:
        qk, kk = _levels(q, k, beta, total, CONFIG)
        _store_sums(pairs[0], 2 * HALF, qk)
        end = _load_vector(vectors, 3, LAYOUT, CONFIG)
        _store_rows(plane, 2, HALF, k * _exp2(end - total), CONFIG)
        grown, key = _exp2(total), k
        _store_rows(plane, 1, HALF, q * grown, CONFIG)
        if CONFIG.DELTA:
            _store_sums(pairs[1], 2 * HALF, kk)
            key = k * beta[:, None]
            _store_rows(plane, 0, HALF, key * grown, CONFIG)
        gap = total - _load_vector(vectors, 1, LAYOUT, CONFIG)
        if HALF == 0:
            key, query = k * _exp2(gap * -1.0), q
        else:
            key, query = key * _exp2(gap), q * _exp2(gap)
    return key, query


@gluon.jit
def _channel_products(q, k, norms, beta, decay, plane, vector, pairs, CONFIG: gl.constexpr):
    """Store the rows of a chunk, the decays [PART] of its state in `vector`, and in `pairs` the
    products (q . k, beta k . k) of each pair of rows with their decays.

    q, k: [32, PART] bfloat16. norms: of queries and keys, and beta: [32]. decay: [32, PART], each
    thread with all rows of a channel.
    """
    PART: gl.constexpr = CONFIG.PART
    ROWS: gl.constexpr = _row_layout(_SIZE, PART)
    MEMORY: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    sums = gl.associative_scan(summable(decay) * _LOG2_E, 0, _add)
    memory = gl.allocate_shared_memory(gl.float32, [CONFIG.C, PART], MEMORY)
    memory.store(sums)
    vectors, is_weak = _borders(sums, vector, CONFIG)
    beta, norm_q = _number_halves(beta, ROWS), _number_halves(norms[0], ROWS)
    norm_k = _number_halves(norms[1], ROWS)
    q, k = _halves(q), _halves(k)
    rights = ()
    for half in gl.static_range(2):
        query = q[half].to(gl.float32) * norm_q[half][:, None]
        key = k[half].to(gl.float32) * norm_k[half][:, None]
        total = memory.slice(half * _SIZE, _SIZE).load(ROWS)
        given = query, key, beta[half], total, vectors, is_weak
        key, query = _half(half, *given, plane, pairs, CONFIG)
        if half == 0:
            rights = _operands(key, False)
    _store_sums(pairs[0], 1, _multiply(_operands(query, True), rights))
    if CONFIG.DELTA:
        _store_sums(pairs[1], 1, _multiply(_operands(key, True), rights))


@gluon.jit
def _find_request(query_start_loc, place, num_reqs, CONFIG: gl.constexpr):
    """Return the request of a chunk, see `schedule.find_request`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    number = 0
    for base in range(1, num_reqs + 1, 128):
        other = base + gl.arange(0, 128, LAYOUT)
        mask = other <= num_reqs
        begins = gl.load(query_start_loc + other, mask=mask, other=0) // CONFIG.C
        number += gl.sum((mask & (begins + other * CONFIG.EXTRA <= place)).to(gl.int32), 0)
    return number


@gluon.jit
def _load_numbers(part, old, new, OLD, NEW, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Return one number of each row of a chunk, [C], from the tail or from the step, 0 where there
    is no token. OLD and NEW are the strides of rows."""
    row = gl.arange(0, CONFIG.C, LAYOUT)
    place = new + (part.token + row) * NEW
    place = gl.where(row < part.held, old + ((part.start + row) % CONFIG.RING) * OLD, place)
    return gl.load(place, mask=row < part.stop - part.start, other=0.0)


@gluon.jit
def _load_rows(part, old, new, OLD, NEW, LAYOUT, IS_NEW: gl.constexpr, CONFIG: gl.constexpr):
    """Return rows of a chunk in the same way, [C, PART]. With IS_NEW, all are in the step."""
    row = gl.arange(0, CONFIG.C, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, CONFIG.PART, gl.SliceLayout(0, LAYOUT))
    place = new + part.token * NEW + (row * NEW)[:, None] + column[None, :]
    if IS_NEW:
        rows = gl.load(place)
    else:
        # Triton 3.9 does not know the alignment of rows of which each has its choice.
        ring = old + (((part.start + row) % CONFIG.RING) * OLD)[:, None] + column[None, :]
        place = gl.where((row < part.held)[:, None], ring, place)
        rows = gl.load(place, mask=(row < part.stop - part.start)[:, None], other=0.0)
    return rows


@gluon.jit
def _load_chunk(part, tokens, tail, IS_NEW: gl.constexpr, CONFIG: gl.constexpr):
    """Return queries, keys and decays; any queries for tokens in the tail, whose outputs nobody
    stores."""
    ROWS: gl.constexpr = _row_layout(CONFIG.C, CONFIG.PART)
    SUMS: gl.constexpr = gl.BlockedLayout([CONFIG.C, 1], [1, 32], [1, CONFIG.PART // _SPAN], [1, 0])
    OLD: gl.constexpr = CONFIG.HK * CONFIG.DK
    OLD_G: gl.constexpr = CONFIG.HV * CONFIG.DK
    old, new = tail.decay, tokens.decay
    k = _load_rows(part, tail.k, tokens.k, OLD, CONFIG.K_T, ROWS, IS_NEW, CONFIG)
    q = _load_rows(part, tokens.q, tokens.q, 0, CONFIG.Q_T, ROWS, IS_NEW, CONFIG)
    return q, k, _load_rows(part, old, new, OLD_G, CONFIG.G_T, SUMS, IS_NEW, CONFIG)


@gluon.jit
def _inverse_lengths(x, CONFIG: gl.constexpr):
    """Return 1 / sqrt(sum of squares + EPS) of each row, 1 without NORM, [C]."""
    lengths = gl.full([CONFIG.C], 1.0, gl.float32, gl.SliceLayout(1, x.type.layout))
    if CONFIG.NORM:
        squares = gl.inline_asm_elementwise(_SQUARES, "=f,=f,r", [x], gl.float32, True, 2)
        lengths = gl.rsqrt(gl.sum(squares, 1) + CONFIG.EPS)
    return lengths


@gluon.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=UNALIGNED)
def channel_matrices_kernel(
    q, k, decay, beta, positions, tail_k, tail_decay, tail_beta, query_start_loc, seq_lens,
    slots, sources, planes, factors, scale, num_reqs, CONFIG: gl.constexpr,
):  # fmt: skip
    """Prepare one chunk of one state head. Arguments and grid of `long_matrices_kernel`. One
    warp for each 32 columns."""
    C: gl.constexpr = CONFIG.C
    PLANES: gl.constexpr = plane_size(C, CONFIG.PART, CONFIG.DELTA, True)
    FACTORS: gl.constexpr = factor_size(C, CONFIG.PART, True)
    TOKEN: gl.constexpr = gl.SliceLayout(1, _row_layout(C, CONFIG.PART))
    place, head = gl.program_id(0), gl.program_id(1)
    number = _find_request(query_start_loc, place, num_reqs, CONFIG)
    if number == num_reqs:
        return
    request = open_request(StateBatch(query_start_loc, seq_lens, slots, sources), number)
    if (request.slot < 0) | (request.count <= 0):
        return
    base = load_base(positions, request, head, 0, CONFIG)
    own = place - request.first // C - number * CONFIG.EXTRA
    if own >= count_chunks(request, base, CONFIG):
        return
    tokens = open_head(Tokens(q, k, k, decay, beta), head, CONFIG)
    tail = open_tail(Tail(tail_k, tail_k, tail_decay, tail_beta), request.source, head, CONFIG)
    part = open_part(request, base, own, CONFIG)
    index = place.to(gl.int64) * CONFIG.HV + head
    plane, vector = planes + index * PLANES, factors + index * FACTORS
    if (part.held <= 0) & (part.stop - part.start == C):
        queries, keys, decays = _load_chunk(part, tokens, tail, True, CONFIG)
    else:
        queries, keys, decays = _load_chunk(part, tokens, tail, False, CONFIG)
    betas = gl.full([C], 1.0, gl.float32, TOKEN)
    if CONFIG.HAS_BETA:
        old, new = tail.beta, tokens.beta
        betas = _load_numbers(part, old, new, CONFIG.HV, CONFIG.B_T, TOKEN, CONFIG)
    gl.store(vector + gl.arange(0, C, TOKEN), betas)
    norms = _inverse_lengths(queries, CONFIG) * scale, _inverse_lengths(keys, CONFIG)
    sums = _allocate_sums(CONFIG), _allocate_sums(CONFIG)
    _channel_products(queries, keys, norms, betas, decays, plane, vector, sums, CONFIG)
    _store_matrix(plane, _load_blocks(sums[0]))
    if CONFIG.DELTA:
        _store_matrix(plane + 2 * C * C, _invert(_load_blocks(sums[1])))


class ChannelLaunch(KernelLaunch):
    """A launch with the candidate in place of the kernel."""

    def __init__(
        self,
        kernel: Any,
        config: Any,
        grid: tuple[int, int],
        numbers: tuple[float, ...] = (),
        **options: int,
    ) -> None:
        # Later tokens change how earlier ones are computed, which T18 forbids in chunks of slots.
        is_long = config.UNIT < config.C == 2 * _SIZE.value
        is_taken = is_long and config.DECAY == DECAY_CHANNEL.value
        if kernel is long_matrices_kernel and is_taken:
            kernel, options = channel_matrices_kernel, {"num_warps": config.PART // _SPAN.value}
        super().__init__(kernel, config, grid, numbers, **options)
