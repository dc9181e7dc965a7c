"""The Hopper decode over quantized caches by CTAs of one warp.

The decode of `decode.py` multiplies with WGMMA, in warpgroups of four warps. Over quantized caches
its time is that of the steps that the four warps take together: they exchange the maxima of the
scores, store the weights to shared memory, and wait for each other several times per tile. Here a
warp has its own range of keys, loads them by TMA into a ring of its own, and multiplies with
`mma.sync`, whose operands are all in registers. It waits for no other warp. Several CTAs of one
warp on each multiprocessor hide the latency of each other.

The rows of both products are keys or elements of values, and the columns are the query rows, at
most 8. A tile of 16-bit words is loaded by `ldmatrix` in the order of an operand, and each word
becomes parts, whose number is that of its elements:

- 8-bit elements have two parts, the lower and the upper half of a word or of a pair of words.
- 4-bit integers have four, their groups, with scales of their own.

Keys of 4-bit integers are not converted: their bits are the last ones of a float16, that is a
subnormal number, 2^-24 or 2^-20 times an integer from 0 to 15. The queries of the latter are
divided by 16, the scores are multiplied by 2^24, and the products start from -8 times the sum of
the queries.

Weights are the results of one product and the second operand of the other one, so 8 x 8 blocks of
them are transposed (`movmatrix`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attnlib.ops.triton.hopper.kernels.compat import (
    arrive_after_copies,
    copy_to_shared,
    exp2,
    launch_dependent_grids,
    load_box,
    log2,
    partition_barrier,
    prefetch_l1,
    store_in_l2,
    wait_on_dependent_grids,
)
from attnlib.ops.triton.hopper.kernels.decode import UNALIGNED, UNSPECIALIZED
from attnlib.ops.triton.hopper.kernels.int4 import float32_scale, largest_scale
from attnlib.ops.triton.hopper.kernels.quantized import (
    WEIGHT_EXPONENT,
    load_kv_scale,
    query_powers,
)
from attnlib.ops.triton.hopper.kernels.ranges import num_key_tiles, tile_range
from attnlib.ops.triton.hopper.kernels.schedule import load_lengths, visible_span, visited_tiles
from attnlib.ops.triton.hopper.kernels.softmax import (
    LN2,
    add_sink,
    score_factor,
    transform_scores,
)
from attnlib.ops.triton.kernels.page_formats import PAGE_INT4, unpack_ptx
from attnlib.ops.triton.kernels.quant import KV_E5M2_BYTES, KV_INT4, KV_INT8, SCALE_PER_TOKEN

__all__ = ["hopper_warp_decode_kernel"]

_PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
"""Layout of [keys, rows] and [elements of a value, rows]."""

_SUMS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [], [], [8, 8])
)
"""Layout of [8, rows]: the sums over the keys that a thread holds."""


@gluon.jit
def _key_parts(words, KV_KIND: gl.constexpr):
    """Convert words [keys, words] of keys to the float16 elements of their parts."""
    if KV_KIND == KV_INT4:
        parts = gl.inline_asm_elementwise(
            "{ .reg .b32 h; shr.u32 h, $4, 8; and.b32 $0, $4, 0x000F000F;"
            " and.b32 $1, $4, 0x00F000F0; and.b32 $2, h, 0x000F000F; and.b32 $3, h, 0x00F000F0; }",
            "=r,=r,=r,=r,r", [words], (gl.float16, gl.float16, gl.float16, gl.float16), True, 2,
        )  # fmt: skip
    elif KV_KIND == KV_E5M2_BYTES:
        parts = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;",
            "=r,=r,r", [words], (gl.float16, gl.float16), True, 2,
        )  # fmt: skip
    elif KV_KIND == KV_INT8:
        parts = gl.inline_asm_elementwise(
            "{ .reg .b32 s, b, c; xor.b32 s, $2, 0x80808080; mov.b32 b, 0x64646464;"
            " mov.b32 c, 0x64806480; prmt.b32 $0, s, b, 0x5140; prmt.b32 $1, s, b, 0x5342;"
            " sub.f16x2 $0, $0, c; sub.f16x2 $1, $1, c; }",
            "=r,=r,r", [words], (gl.float16, gl.float16), True, 2,
        )  # fmt: skip
    else:
        parts = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [words], (gl.float16, gl.float16), True, 2,
        )  # fmt: skip
    return parts


@gluon.jit
def _value_parts(words, KV_KIND: gl.constexpr):
    """Convert words [words, keys] of values to the float16 elements of their parts."""
    if KV_KIND == KV_INT4:
        ASM: gl.constexpr = unpack_ptx(PAGE_INT4, 90)
        parts = gl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [words], (gl.float16, gl.float16, gl.float16, gl.float16), True, 2
        )
    elif KV_KIND == KV_E5M2_BYTES:
        parts = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;",
            "=r,=r,r", [words], (gl.float16, gl.float16), True, 2,
        )  # fmt: skip
    elif KV_KIND == KV_INT8:
        parts = gl.inline_asm_elementwise(
            "{ .reg .b32 s, b, c; xor.b32 s, $2, 0x80808080; mov.b32 b, 0x64646464;"
            " mov.b32 c, 0x64806480; prmt.b32 $0, s, b, 0x5240; prmt.b32 $1, s, b, 0x5341;"
            " sub.f16x2 $0, $0, c; sub.f16x2 $1, $1, c; }",
            "=r,=r,r", [words], (gl.float16, gl.float16), True, 2,
        )  # fmt: skip
    else:
        parts = gl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [words], (gl.float16, gl.float16), True, 2,
        )  # fmt: skip
    return parts


@gluon.constexpr_function
def _num_parts(kind):
    """Return the parts of a word."""
    return 4 if kind == KV_INT4 else 2


@gluon.jit
def _key_elements(index, part: gl.constexpr, WORDS: gl.constexpr, KV_KIND: gl.constexpr):
    """Return the elements of a head in the order of a part of the keys."""
    if KV_KIND == KV_INT4:
        found = part * WORDS + index
    else:
        # A pair of words holds four elements; each part has two of them.
        found = index // 2 * 4 + 2 * part + index % 2
    return found


@gluon.jit
def _value_elements(index, part: gl.constexpr, WORDS: gl.constexpr, KV_KIND: gl.constexpr):
    """Return the elements of a head in the order of a part of the values."""
    if KV_KIND == KV_INT4:
        found = part * WORDS + index
    else:
        found = 2 * index + part
    return found


@gluon.jit
def _transposed(weights):
    """Return float16 weights [keys, rows], the result of a product, as the second operand of one.

    `movmatrix` transposes the 8 x 8 blocks that the registers of a warp hold.
    """
    KEYS: gl.constexpr = weights.shape[0]
    ROWS: gl.constexpr = weights.shape[1]
    blocks = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r", [weights], gl.float16, False, 2,
    )  # fmt: skip
    blocks = gl.permute(gl.reshape(blocks, [KEYS // 8, 8, ROWS]), (0, 2, 1))
    return gl.convert_layout(
        gl.reshape(blocks, [KEYS, ROWS]), gl.DotOperandLayout(1, _PRODUCTS, 2), assert_trivial=True
    )


@gluon.jit
def _load_queries(
    query, row_offsets, valid, WORDS: gl.constexpr, D: gl.constexpr, KV_KIND: gl.constexpr
):
    """Load the query rows of a split.

    Returns:
        (for each part: the second operand [elements, rows] and the first scores [rows]; the
        factors [rows] of the scores), in float16 and float32.
    """
    PARTS: gl.constexpr = _num_parts(KV_KIND)
    ROWS: gl.constexpr = row_offsets.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, WORDS // 4], [8, 4], [1, 1], [1, 0])
    COLUMN: gl.constexpr = gl.SliceLayout(0, _PRODUCTS)
    index = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))
    parts = ()
    largest = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(PARTS):
        elements = _key_elements(index, part, WORDS, KV_KIND)
        pointers = query + row_offsets[:, None] + elements[None, :]
        loaded = gl.load(pointers, mask=valid[:, None] & (elements < D)[None, :], other=0.0)
        parts = parts + (loaded.to(gl.float32),)
        largest = gl.maximum(largest, gl.max(gl.abs(parts[part]), 1))
    power, inverse = query_powers(largest)
    operands = ()
    initial = ()
    for part in gl.static_range(PARTS):
        rows = (parts[part] * power[:, None]).to(gl.float16)
        start = gl.zeros([ROWS], gl.float32, COLUMN)
        if KV_KIND == KV_INT4:
            total = gl.sum(rows.to(gl.float32), 1)
            start = gl.convert_layout(total, COLUMN) * (-8.0 * 2.0**-24)
            if part % 2 == 1:
                rows = (rows.to(gl.float32) * 0.0625).to(gl.float16)
        operand = gl.convert_layout(gl.permute(rows, (1, 0)), gl.DotOperandLayout(1, _PRODUCTS, 2))
        operands = operands + (operand,)
        initial = initial + (start,)
    factor = gl.convert_layout(inverse, COLUMN)
    if KV_KIND == KV_INT4:
        factor = factor * 2.0**24
    return operands, initial, factor


@gluon.jit
def _scores(tile, operands, initial, k_scales, KV_KIND: gl.constexpr):
    """Return the products of a tile of keys with the queries, [keys, rows], times the scales."""
    KEYS: gl.constexpr = tile.shape[0]
    ROWS: gl.constexpr = initial[0].shape[0]
    words = tile.load(gl.DotOperandLayout(0, _PRODUCTS, 2))
    parts = _key_parts(words, KV_KIND)
    zeros = gl.zeros([KEYS, ROWS], gl.float32, _PRODUCTS)
    if KV_KIND == KV_INT4:
        s0 = mma_v2(parts[0], operands[0], zeros + initial[0][None, :])
        s1 = mma_v2(parts[1], operands[1], zeros + initial[1][None, :])
        s2 = mma_v2(parts[2], operands[2], zeros + initial[2][None, :])
        s3 = mma_v2(parts[3], operands[3], zeros + initial[3][None, :])
        scores = s0 * float32_scale(k_scales, 0)[:, None]
        scores += s1 * float32_scale(k_scales, 1)[:, None]
        scores += s2 * float32_scale(k_scales, 2)[:, None]
        scores += s3 * float32_scale(k_scales, 3)[:, None]
    else:
        scores = mma_v2(parts[1], operands[1], mma_v2(parts[0], operands[0], zeros))
        if k_scales is not None:
            scores = scores * k_scales[:, None]
    return scores


@gluon.jit
def _part_weights(
    weights, v_scales, part: gl.constexpr, MASKED: gl.constexpr, KV_KIND: gl.constexpr
):
    """Return the weights of a part of the values as the second operand of a product."""
    if v_scales is not None:
        if KV_KIND == KV_INT4:
            scaled = weights * float32_scale(v_scales, part)[:, None]
        else:
            scaled = weights * v_scales[:, None]
        if MASKED:
            # The scales of hidden keys may be NaN.
            scaled = gl.where(weights == 0.0, 0.0, scaled)
    else:
        scaled = weights
    return _transposed(scaled.to(gl.float16))


@gluon.jit
def _add_values(tile, acc, weights, v_scales, valid, MASKED: gl.constexpr, KV_KIND: gl.constexpr):
    """Add the products of a tile of values with the weights [keys, rows] to `acc`.

    With MASKED, float8 values of keys from `valid` on are 0: a page may hold anything past the
    sequence's end, and 0 * NaN is NaN (P5).
    """
    KEYS: gl.constexpr = tile.shape[0]
    WORDS: gl.constexpr = tile.shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, _PRODUCTS, 2)
    words = tile.permute((1, 0)).load(OPERAND)
    if MASKED:
        if (KV_KIND != KV_INT4) and (KV_KIND != KV_INT8):
            keys = gl.arange(0, KEYS, gl.SliceLayout(0, OPERAND))
            words = gl.where(
                keys[None, :] < valid, words, gl.zeros([WORDS, KEYS], gl.int16, OPERAND)
            )
    parts = _value_parts(words, KV_KIND)
    if KV_KIND == KV_INT4:
        return (
            mma_v2(parts[0], _part_weights(weights, v_scales, 0, MASKED, KV_KIND), acc[0]),
            mma_v2(parts[1], _part_weights(weights, v_scales, 1, MASKED, KV_KIND), acc[1]),
            mma_v2(parts[2], _part_weights(weights, v_scales, 2, MASKED, KV_KIND), acc[2]),
            mma_v2(parts[3], _part_weights(weights, v_scales, 3, MASKED, KV_KIND), acc[3]),
        )  # fmt: skip
    else:
        operand = _part_weights(weights, v_scales, 0, MASKED, KV_KIND)
        return mma_v2(parts[0], operand, acc[0]), mma_v2(parts[1], operand, acc[1])


@gluon.jit
def _scale_all(acc, factor):
    """Return the tensors [elements, rows] times factors [rows]."""
    PARTS: gl.constexpr = len(acc)
    if PARTS == 4:
        return (
            acc[0] * factor[None, :], acc[1] * factor[None, :], acc[2] * factor[None, :],
            acc[3] * factor[None, :],
        )  # fmt: skip
    else:
        return acc[0] * factor[None, :], acc[1] * factor[None, :]


@gluon.jit
def _tile_pages(
    table, pages, num_blocks, tile, is_live, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr
):
    """Load the blocks of a tile. Positions without a block get `num_blocks`."""
    BOX: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    first_page = tile * BLOCK_N // BLOCK_SIZE
    # 32 pages ahead: one 128-byte line of the block table.
    prefetch_l1(table + gl.maximum(gl.minimum(first_page + 32, pages - 1), 0))
    blocks = ()
    for box in gl.static_range(BLOCK_N // BOX):
        column = first_page + box * BOX // BLOCK_SIZE
        blocks = blocks + (
            gl.load(table + column, mask=(column < pages) & is_live, other=num_blocks),
        )
    return blocks


@gluon.jit
def _issue_tile(
    key_cache, value_cache, blocks, num_blocks, kv_head, tile, k_ring, v_ring, full, stage, scales,
    BLOCK_SIZE: gl.constexpr, KV_KIND: gl.constexpr,
):  # fmt: skip
    """Issue the loads of the keys, the values and the scales of a tile. The stage is free."""
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    BOX: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    BYTES: gl.constexpr = 2 * BLOCK_N * (k_ring.shape[2] + v_ring.shape[2])
    inside = tile * BLOCK_N % BLOCK_SIZE
    if scales[8] is not None:
        keys = gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [1], [0]))
        block = gl.full([BLOCK_N], 0, gl.int32, keys.type.layout) + blocks[0]
        for box in gl.static_range(1, BLOCK_N // BOX):
            block = gl.where(keys >= box * BOX, blocks[box], block)
        _copy_scales(
            scales, block, num_blocks, (inside + keys) % BLOCK_SIZE, kv_head, stage, KV_KIND
        )
        arrive_after_copies(full.index(stage), increment_count=False)
    mbarrier.expect(full.index(stage), BYTES)
    for box in gl.static_range(BLOCK_N // BOX):
        # Blocks past the last one are out of bounds: TMA fills their boxes with zeros.
        where = [blocks[box], kv_head, inside + box * BOX % BLOCK_SIZE, 0]
        load_box(key_cache, where, full.index(stage), k_ring.index(stage).slice(box * BOX, BOX, 0))
        load_box(
            value_cache, where, full.index(stage), v_ring.index(stage).slice(box * BOX, BOX, 0)
        )


@gluon.jit
def _copy_scales(scales, block, num_blocks, position, kv_head, stage, KV_KIND: gl.constexpr):
    """Issue the copies of the scales of keys in these blocks and positions into shared memory.
    Scales of positions without a block are 0. Arguments as of `quantized.copy_token_scales`."""
    k_scale, v_scale, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, ring, _ = (
        scales
    )
    if KV_KIND == KV_INT4:
        k_scale = k_scale.to(gl.pointer_type(gl.int64))
        v_scale = v_scale.to(gl.pointer_type(gl.int64))
    inside = (block >= 0) & (block < num_blocks)
    block = block.to(gl.int64)
    k_offsets = block * stride_kb + (position * stride_kn + kv_head * stride_kh)
    v_offsets = block * stride_vb + (position * stride_vn + kv_head * stride_vh)
    copy_to_shared(ring.index(2 * stage), k_scale + k_offsets, mask=inside)
    copy_to_shared(ring.index(2 * stage + 1), v_scale + v_offsets, mask=inside)


@gluon.jit
def _step(
    k_tile, v_tile, k_scales, v_scales, operands, initial, acc, row_max, row_sum, k_factor, factor,
    soft_cap, row_first, row_last, tile_start, valid, MASKED: gl.constexpr,
    CHECK_FIRST: gl.constexpr, HAS_CAP: gl.constexpr, KV_KIND: gl.constexpr,
):  # fmt: skip
    """Multiply by the keys and the values of a tile.

    Returns:
        (acc, row_max, row_sum).
    """
    KEYS: gl.constexpr = k_tile.shape[0]
    scores = _scores(k_tile, operands, initial, k_scales, KV_KIND)
    if HAS_CAP:
        scores = transform_scores(scores * k_factor[None, :], factor, soft_cap, True)
    else:
        scores = scores * (k_factor * factor)[None, :]
    if MASKED:
        keys = tile_start + gl.arange(0, KEYS, gl.SliceLayout(1, _PRODUCTS))
        visible = keys[:, None] < row_last[None, :]
        if CHECK_FIRST:
            visible = visible & (keys[:, None] >= row_first[None, :])
        scores = gl.where(visible, scores, float("-inf"))
    bounds = scores
    if v_scales is not None:
        # Weights times scales are at most 1. Scales of hidden keys may be anything.
        unit = v_scales
        if KV_KIND == KV_INT4:
            unit = largest_scale(v_scales)
        bounds = scores + log2(gl.minimum(gl.maximum(unit, 2.0**-100), 2.0**100))[:, None]
    new_max = gl.maximum(row_max, gl.max(bounds, 0))
    finite_max = new_max
    if MASKED:
        # -inf - -inf is NaN: rows without a visible key are measured from 0.
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores - (finite_max - WEIGHT_EXPONENT)[None, :])
    acc_scale = exp2(row_max - finite_max)
    # Sums over the keys that a thread holds.
    sum_scale = gl.convert_layout(acc_scale, gl.SliceLayout(0, _SUMS), assert_trivial=True)
    row_sum = row_sum * sum_scale[None, :] + _fold(weights)
    acc = _scale_all(acc, acc_scale)
    acc = _add_values(v_tile, acc, weights, v_scales, valid, MASKED, KV_KIND)
    return acc, new_max, row_sum


@gluon.jit
def _fold(weights):
    """Sum weights [keys, rows] over the keys that a thread holds, [8, rows]."""
    KEYS: gl.constexpr = weights.shape[0]
    ROWS: gl.constexpr = weights.shape[1]
    folded = gl.sum(gl.reshape(weights, [KEYS // 8, 8, ROWS]), 0)
    return gl.convert_layout(folded, _SUMS, assert_trivial=True)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def hopper_warp_decode_kernel(
    key_desc, value_desc, query, out, lse, sinks, k_scale, v_scale, aux0, aux1, aux2, aux3,
    query_start_loc, seq_lens, block_table, partials, partial_lses, split_headers, counters, scale,
    soft_cap, left, right, chunk, num_reqs, num_tokens, num_blocks, rows, stride_qt, stride_qh,
    stride_ot, stride_oh, stride_lt, stride_table, rows0, columns0, rows1, columns1, rows2,
    columns2, rows3, columns3, stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn,
    stride_vsh,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    WIDTH: gl.constexpr, WIDTH_V: gl.constexpr, TILE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_CHUNK: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr, KV_KIND: gl.constexpr,
    K_SCALE_KIND: gl.constexpr, V_SCALE_KIND: gl.constexpr,
):  # fmt: skip
    """One CTA of one warp. Grid: tile ranges * NUM_KV_HEADS.

    Arguments are those of `hopper_decode_kernel`; those of score functions and `counters` are None.
    A combine kernel follows.
    """
    PARTS: gl.constexpr = _num_parts(KV_KIND)
    WORDS: gl.constexpr = WIDTH // PARTS
    WORDS_V: gl.constexpr = WIDTH_V // PARTS
    DTYPE: gl.constexpr = out.dtype.element_ty
    COLUMN: gl.constexpr = gl.SliceLayout(0, _PRODUCTS)
    CHECK_LEFT: gl.constexpr = HAS_LEFT or HAS_CHUNK
    HAS_SCALES: gl.constexpr = K_SCALE_KIND == SCALE_PER_TOKEN
    Q_ROWS: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([1, WORDS // 4], [8, 4], [1, 1], [1, 0])
    )

    k_ring = gl.allocate_shared_memory(
        gl.int16, [STAGES, BLOCK_N, WORDS],
        gl.NVMMASharedLayout.get_default_for([BLOCK_N, WORDS], gl.int16),
    )  # fmt: skip
    v_ring = gl.allocate_shared_memory(
        gl.int16, [STAGES, BLOCK_N, WORDS_V],
        gl.NVMMASharedLayout.get_default_for([BLOCK_N, WORDS_V], gl.int16),
    )  # fmt: skip
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=33 if HAS_SCALES else 1)
    fence_async_shared()
    scales = (None, None, None, None, None, None, None, None, None, None)
    if HAS_SCALES:
        scale_ring = gl.allocate_shared_memory(
            gl.int64 if KV_KIND == KV_INT4 else gl.float32, [2 * STAGES, BLOCK_N],
            gl.SwizzledSharedLayout(1, 1, 1, [0]),
        )  # fmt: skip
        scales = (
            k_scale, v_scale, stride_ksb, stride_ksn, stride_ksh, stride_vsb, stride_vsn,
            stride_vsh, scale_ring, None,
        )  # fmt: skip

    factor = score_factor(scale, soft_cap, HAS_CAP)
    # PDL: the previous kernel may have written the queries, the cache, the lengths or the table.
    wait_on_dependent_grids()
    # The combine kernel may start; it waits for this kernel's results by itself.
    launch_dependent_grids()
    worker = gl.program_id(0)
    num_ranges = gl.num_programs(0) // NUM_KV_HEADS
    kv_head = worker % NUM_KV_HEADS
    position, range_end, per_range, request, before = tile_range(
        query_start_loc, seq_lens, left, right, chunk, num_reqs, worker // NUM_KV_HEADS, num_ranges,
        None, None, BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
    range_begin = position
    key_scale = load_kv_scale(k_scale, kv_head, K_SCALE_KIND)
    value_scale = load_kv_scale(v_scale, kv_head, V_SCALE_KIND)
    step = 0
    while position < range_end:
        tiles = num_key_tiles(
            query_start_loc, seq_lens, request, True, left, right, chunk, None, None, BLOCK_N,
            CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
        request_end = before + tiles
        if position < request_end:
            skipped = position - before
            count = gl.minimum(tiles - skipped, range_end - position)
            start, query_len, seq_len = load_lengths(query_start_loc, seq_lens, request, True)
            first_tile, left_end, right_begin, _ = visited_tiles(
                0, query_len, seq_len, left, right, chunk, request, None, None, TILE_TOKENS,
                BLOCK_N, CAUSAL, HAS_LEFT, HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            first = first_tile + skipped
            table = block_table + request.to(gl.int64) * stride_table
            pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
            # All lanes have read what the stages held.
            partition_barrier()
            blocks = ()
            for ahead in gl.static_range(STAGES):
                blocks = blocks + (
                    _tile_pages(
                        table, pages, num_blocks, first + ahead, ahead < count, BLOCK_N, BLOCK_SIZE
                    ),
                )
            _issue_tile(
                key_desc, value_desc, blocks[0], num_blocks, kv_head, first, k_ring, v_ring, full,
                step % STAGES, scales, BLOCK_SIZE, KV_KIND)  # fmt: skip

            q_rows = gl.arange(0, ROWS, Q_ROWS)
            q_valid = (q_rows < TILE_TOKENS * GROUP) & (q_rows // GROUP < query_len)
            q_offsets = (start + q_rows // GROUP).to(gl.int64) * stride_qt + (
                kv_head * GROUP + q_rows % GROUP
            ).to(gl.int64) * stride_qh
            operands, initial, k_factor = _load_queries(
                query, q_offsets, q_valid, WORDS, D, KV_KIND
            )
            k_factor = k_factor * key_scale

            # The other stages are loaded once the first tile is here: otherwise it shares the
            # bandwidth with them, and all warps begin later.
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            for ahead in gl.static_range(1, STAGES):
                if ahead < count:
                    _issue_tile(
                        key_desc, value_desc, blocks[ahead], num_blocks, kv_head, first + ahead,
                        k_ring, v_ring, full, (step + ahead) % STAGES, scales, BLOCK_SIZE,
                        KV_KIND)  # fmt: skip

            row = gl.arange(0, ROWS, COLUMN)
            token = row // GROUP
            row_first, row_last = visible_span(
                token + (seq_len - query_len), seq_len, left, right, chunk, CAUSAL, HAS_LEFT,
                HAS_RIGHT, HAS_CHUNK)  # fmt: skip
            row_max = gl.full([ROWS], float("-inf"), gl.float32, COLUMN)
            row_sum = gl.zeros([8, ROWS], gl.float32, _SUMS)
            none = gl.zeros([WORDS_V, ROWS], gl.float32, _PRODUCTS)
            if PARTS == 4:
                acc = (none, none, none, none)
            else:
                acc = (none, none)

            for i in range(0, count):
                tile = first + i
                stage = (step + i) % STAGES
                later = _tile_pages(
                    table, pages, num_blocks, tile + STAGES, i + STAGES < count, BLOCK_N, BLOCK_SIZE
                )
                mbarrier.wait(full.index(stage), ((step + i) // STAGES) & 1)
                k_scales = None
                v_scales = None
                if HAS_SCALES:
                    k_scales = scales[8].index(2 * stage).load(gl.SliceLayout(1, _PRODUCTS))
                    v_scales = scales[8].index(2 * stage + 1).load(gl.SliceLayout(1, _PRODUCTS))
                if (tile >= right_begin) | (tile < left_end):
                    acc, row_max, row_sum = _step(
                        k_ring.index(stage), v_ring.index(stage), k_scales, v_scales, operands,
                        initial, acc, row_max, row_sum, k_factor, factor, soft_cap, row_first,
                        row_last, tile * BLOCK_N, seq_len - tile * BLOCK_N, True, CHECK_LEFT,
                        HAS_CAP, KV_KIND)  # fmt: skip
                else:
                    acc, row_max, row_sum = _step(
                        k_ring.index(stage), v_ring.index(stage), k_scales, v_scales, operands,
                        initial, acc, row_max, row_sum, k_factor, factor, soft_cap, row_first,
                        row_last, tile * BLOCK_N, 0, False, CHECK_LEFT, HAS_CAP,
                        KV_KIND)  # fmt: skip
                # All lanes have the tile in registers.
                partition_barrier()
                if i + STAGES < count:
                    _issue_tile(
                        key_desc, value_desc, later, num_blocks, kv_head, tile + STAGES, k_ring,
                        v_ring, full, stage, scales, BLOCK_SIZE, KV_KIND)  # fmt: skip
            step += count

            num_splits = (request_end - 1) // per_range - before // per_range + 1
            head = kv_head * GROUP + row % GROUP
            valid = (row < TILE_TOKENS * GROUP) & (token < query_len)
            partial_index = 2 * worker + (position > range_begin).to(gl.int32)
            if skipped == 0:
                # The CTA with a request's first tile tells the combine kernel how many splits there
                # are and where the first partial result is.
                header = (partial_index << 15) | (token * GROUP << 9) | num_splits
                gl.store(
                    split_headers + (start + token) * NUM_KV_HEADS + kv_head,
                    header,
                    mask=valid & (row % GROUP == 0),
                )
            final_sum = gl.convert_layout(gl.sum(row_sum, 0), COLUMN) * (2.0**-14)
            finite_max = gl.where(row_max == float("-inf"), 0.0, row_max)
            acc_scale = gl.full([ROWS], 1.0, gl.float32, COLUMN)
            if HAS_SINK:
                if num_splits == 1:
                    # Otherwise the sink counts when the splits are combined (M4).
                    finite_max, acc_scale, final_sum = add_sink(
                        row_max, final_sum, gl.load(sinks + head, mask=valid, other=0.0)
                    )
            empty = final_sum == 0.0
            safe_sum = gl.where(empty, 1.0, final_sum)
            base2 = gl.where(empty, float("-inf"), finite_max + gl.log2(safe_sum))
            acc = _scale_all(acc, acc_scale / safe_sum * (value_scale * 2.0**-14))
            index = gl.arange(0, WORDS_V, gl.SliceLayout(1, _PRODUCTS))
            if num_splits == 1:
                offsets = (start + token).to(gl.int64) * stride_ot + head.to(gl.int64) * stride_oh
                for part in gl.static_range(PARTS):
                    lanes = _value_elements(index, part, WORDS_V, KV_KIND)
                    gl.store(
                        out + offsets[None, :] + lanes[:, None],
                        acc[part].to(DTYPE),
                        mask=valid[None, :] & (lanes < DV)[:, None],
                    )
                if HAS_LSE:
                    gl.store(
                        lse + (start + token).to(gl.int64) * stride_lt + head,
                        base2 * LN2,
                        mask=valid,
                    )
            else:
                for part in gl.static_range(PARTS):
                    lanes = _value_elements(index, part, WORDS_V, KV_KIND)
                    store_in_l2(
                        partials + ((partial_index * rows + row) * DV)[None, :] + lanes[:, None],
                        acc[part],
                        valid[None, :] & (lanes < DV)[:, None],
                    )
                gl.store(partial_lses + partial_index * rows + row, base2, mask=valid)
            position += count
        before = request_end
        position = gl.maximum(position, before)
        request += 1
