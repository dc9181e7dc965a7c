"""Products of the tokens of a chunk with decays per channel (`state_channel_chunks`).

With b the sums of the decays up to each token, of each channel, a product of two tokens i > j is
the sum over the channels of k_i k_j exp(b_i - b_j). A border r between them divides the factor
between the operands: exp(b_i - r) exp(r - b_j). Tokens of two halves of a chunk have a border
between them, so that no exponent is positive. Where the decays of a half are so weak that both
exponents are bounded, one product with its middle as the border gives all pairs in it. Otherwise
its blocks of 2, 4, ... tokens are joined as in `kernels.state_matrices`.

Each warp multiplies 32 channels. Its threads hold operands as they load them: left and right ones
are the same numbers of the same threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from attnlib.ops.triton.hopper.kernels.state_blocks import SIZE, SPAN, store_sums
from attnlib.ops.triton.hopper.kernels.state_pieces import parts_of, rows_place
from attnlib.ops.triton.hopper.kernels.state_products import add
from attnlib.ops.triton.kernels.state_sums import summable

__all__ = ["channel_products", "row_layout"]

_LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
_MOST: gl.constexpr = gl.constexpr(40.0 * 1.4426950408889634)
"""Largest binary exponent of a factor: that of bounded gates (-5) over half of 16 tokens. Products
of two do not overflow, and the second number of bfloat16 keeps its bits."""


@gluon.constexpr_function
def row_layout(rows, columns):
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
def _halves(x, LAYOUT: gl.constexpr):
    """Return the first and the last 16 rows of x, [32, PART] or [32]."""
    if len(x.shape) == 1:
        both = x.reshape([2, SIZE]).permute((1, 0))
    else:
        both = x.reshape([2, SIZE, x.shape[1]]).permute((1, 2, 0))
    first, last = both.split()
    first = gl.convert_layout(first, LAYOUT, assert_trivial=True)
    return first, gl.convert_layout(last, LAYOUT, assert_trivial=True)


@gluon.jit
def _operand(x, IS_LEFT: gl.constexpr):
    """Return rows [16, PART] of bfloat16 as operands of `_multiply`. The order of channels in a
    product is that in which threads have them."""
    WARPS: gl.constexpr = x.shape[1] // SPAN
    x = x.reshape([SIZE, WARPS, 4, 2, SPAN // 8])
    if IS_LEFT:
        x = x.permute((1, 0, 3, 2, 4)).reshape([WARPS, SIZE, SPAN])
    else:
        x = x.permute((1, 3, 2, 4, 0)).reshape([WARPS, SPAN, SIZE])
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
    acc = gl.zeros([WARPS, SIZE, SIZE], gl.float32, _product_layout(WARPS))
    return mma_v2(a[0], b[0], mma_v2(a[1], b[0], mma_v2(a[0], b[1], acc)))


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _store_rows(plane, which: gl.constexpr, HALF: gl.constexpr, x, CONFIG: gl.constexpr):
    """Store half of the rows of `rows_place` in two parts."""
    LAYOUT: gl.constexpr = x.type.layout
    row = gl.arange(0, SIZE, gl.SliceLayout(1, LAYOUT)) + HALF * SIZE
    column = gl.arange(0, CONFIG.PART, gl.SliceLayout(0, LAYOUT))
    place = rows_place(plane, which, CONFIG)
    places = place + (row * CONFIG.PART)[:, None] + column[None, :]
    high, low = parts_of(x)
    gl.store(places, high)
    gl.store(places + CONFIG.C * CONFIG.PART, low)


@gluon.jit
def _levels(q, k, beta, total, CONFIG: gl.constexpr):
    """Return the products (q . k, beta k . k) of each pair of 16 rows, with any decays."""
    WARPS: gl.constexpr = CONFIG.PART // SPAN
    LAYOUT: gl.constexpr = _product_layout(WARPS)
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    row = gl.arange(0, SIZE, ROW)[None, :, None]
    column = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    own = gl.convert_layout(gl.sum(q * k, 1), ROW)[None, :, None]
    kk = gl.zeros([WARPS, SIZE, SIZE], gl.float32, LAYOUT)
    qk = gl.where((row == column) & (warp == 0), own, kk)
    token = gl.arange(0, SIZE, gl.SliceLayout(1, total.type.layout))[:, None]
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
        store_sums(pairs[0], 2 * HALF, _multiply(_operands(query, True), operands))
        if CONFIG.DELTA:
            key = k * beta[:, None] * grown
            _store_rows(plane, 0, HALF, key * before, CONFIG)
            store_sums(pairs[1], 2 * HALF, _multiply(_operands(key, True), operands))
        if HALF == 0:
            key = right
        between = _load_vector(vectors, VECTOR + 2, LAYOUT, CONFIG)
        key, query = key * between, query * between
    else:
        qk, kk = _levels(q, k, beta, total, CONFIG)
        store_sums(pairs[0], 2 * HALF, qk)
        end = _load_vector(vectors, 3, LAYOUT, CONFIG)
        _store_rows(plane, 2, HALF, k * _exp2(end - total), CONFIG)
        grown, key = _exp2(total), k
        _store_rows(plane, 1, HALF, q * grown, CONFIG)
        if CONFIG.DELTA:
            store_sums(pairs[1], 2 * HALF, kk)
            key = k * beta[:, None]
            _store_rows(plane, 0, HALF, key * grown, CONFIG)
        gap = total - _load_vector(vectors, 1, LAYOUT, CONFIG)
        if HALF == 0:
            key, query = k * _exp2(gap * -1.0), q
        else:
            key, query = key * _exp2(gap), q * _exp2(gap)
    return key, query


@gluon.jit
def channel_products(q, k, norms, beta, decay, plane, vector, pairs, CONFIG: gl.constexpr):
    """Store the rows of a chunk, the decays [PART] of its state in `vector`, and in `pairs` the
    products (q . k, beta k . k) of each pair of rows with their decays.

    q, k: [32, PART] bfloat16. norms: of queries and keys, and beta: [32]. decay: [32, PART], each
    thread with all rows of a channel.
    """
    PART: gl.constexpr = CONFIG.PART
    ROWS: gl.constexpr = row_layout(SIZE, PART)
    MEMORY: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    sums = gl.associative_scan(summable(decay) * _LOG2_E, 0, add)
    memory = gl.allocate_shared_memory(gl.float32, [CONFIG.C, PART], MEMORY)
    memory.store(sums)
    vectors, is_weak = _borders(sums, vector, CONFIG)
    NUMBERS: gl.constexpr = gl.SliceLayout(1, ROWS)
    beta, norm_q = _halves(beta, NUMBERS), _halves(norms[0], NUMBERS)
    norm_k, q, k = _halves(norms[1], NUMBERS), _halves(q, ROWS), _halves(k, ROWS)
    rights = ()
    for half in gl.static_range(2):
        query = q[half].to(gl.float32) * norm_q[half][:, None]
        key = k[half].to(gl.float32) * norm_k[half][:, None]
        total = memory.slice(half * SIZE, SIZE).load(ROWS)
        given = query, key, beta[half], total, vectors, is_weak
        key, query = _half(half, *given, plane, pairs, CONFIG)
        if half == 0:
            rights = _operands(key, False)
    store_sums(pairs[0], 1, _multiply(_operands(query, True), rights))
    if CONFIG.DELTA:
        store_sums(pairs[1], 1, _multiply(_operands(key, True), rights))
