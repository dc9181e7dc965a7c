"""The main loop's step of the Hopper prefill: two WGMMAs in flight and the softmax between them.

The product with the keys of one tile is issued before the product with the values of the previous
tile is awaited (FlashAttention-3, Shah et al. 2024), so that the tensor cores work during the
softmax. Weights are carried from one step to the next.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.ops.triton.hopper.kernels.instruction_order import before_wait
from attnlib.ops.triton.hopper.kernels.quantized import WEIGHT_EXPONENT
from attnlib.ops.triton.hopper.kernels.softmax import (
    LOG2E,
    apply_function,
    bounded_softmax,
    mask_scores,
    online_softmax,
    online_softmax_by_row,
    rescale,
    softmax_by_sign,
    softmax_with_slope,
    transform_scores,
)
from attnlib.ops.triton.hopper.kernels.value_columns import multiply_value_parts
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = [
    "BOUNDED",
    "hidden_zero",
    "keep_queries",
    "multiply_parts",
    "overlapped_step",
    "pack_weights",
    "unpack_weights",
    "weigh_tile",
]


BOUNDED = gl.constexpr(2)
"""Value of HAS_CAP for `bounded_softmax`; True for `online_softmax`."""


@gluon.jit
def pack_weights(weights, DTYPE: gl.constexpr):
    """Convert float32 weights [M, N] to pairs of DTYPE in 32-bit words [M, N // 2]."""
    # As loop-carried values, 16-bit elements take a register each and are packed again for every
    # product. Words take half of the registers.
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    low, high = gl.split(gl.reshape(weights, [M, N // 2, 2]))
    if DTYPE == gl.bfloat16:
        words = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )
    else:
        words = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
        )
    return words


@gluon.jit
def unpack_weights(words, DTYPE: gl.constexpr, P_LAYOUT: gl.constexpr):
    """Convert packed weights to the register operand [M, N] of the product with the values."""
    M: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1] * 2
    low = words.to(gl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [M, N]), P_LAYOUT)


@gluon.jit
def wait_for_tile(full, stage, parity, COPIED: gl.constexpr):
    """Wait until a stage of a ring has been loaded; COPIED: by `cp.async`, and not by TMA."""
    mbarrier.wait(full.index(stage), parity)
    if COPIED:
        # WGMMA reads shared memory through the async proxy.
        fence_async_shared()


@gluon.jit
def hidden_zero(step):
    """Return 0 as a function of a step that the compiler cannot evaluate.

    Matrix descriptors of operands at a constant address would be kept in registers during the whole
    loop: two for each 16 elements of the head.
    """
    return gl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [step], gl.int32, True, 1)


@gluon.jit
def _multiply_part(
    q_operand, k_tile, scores, HALF: gl.constexpr, REST: gl.constexpr, SIZE: gl.constexpr
):  # fmt: skip
    """Issue the product over the SIZE elements that are a part of the REST after HALF, if any."""
    START: gl.constexpr = HALF + REST // (2 * SIZE) * (2 * SIZE)
    if REST % (2 * SIZE) >= SIZE:
        keys = k_tile.slice(START, SIZE, 1).permute((1, 0))
        scores = warpgroup_mma(q_operand.slice(START, SIZE, 1), keys, scores, is_async=True)
    return scores


@gluon.jit
def multiply_keys(q_operand, k_tile, zeros, ELEMENTS: gl.constexpr):
    """Issue Q @ K^T over the first ELEMENTS elements of a head, a multiple of 16."""
    WIDTH: gl.constexpr = k_tile.shape[1]
    if ELEMENTS == WIDTH:
        scores = warpgroup_mma(
            q_operand, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
        )
    else:
        # The rest after the first half in parts of powers of two.
        HALF: gl.constexpr = WIDTH // 2
        scores = warpgroup_mma(
            q_operand.slice(0, HALF, 1), k_tile.slice(0, HALF, 1).permute((1, 0)), zeros,
            use_acc=False, is_async=True)  # fmt: skip
        for bit in gl.static_range(4):
            scores = _multiply_part(q_operand, k_tile, scores, HALF, ELEMENTS - HALF, 128 >> bit)
    return scores


@gluon.jit
def multiply_values(weights, v_tile, acc, PART: gl.constexpr):
    """Issue P @ V + acc, over part PART of the value elements; -1 is all."""
    COLUMNS: gl.constexpr = acc.shape[1]
    values = v_tile
    if PART >= 0:
        values = v_tile.slice(PART * COLUMNS, COLUMNS, 1)
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def weigh_tile(
    scores, tile, row_first, row_last, row_max, row_sum, factor, k_factor, soft_cap, scale,
    positions, heads, request, aux, SCORE: gl.constexpr, RAW_SCORE: gl.constexpr,
    KEY_SLOPE: gl.constexpr, MASKED: gl.constexpr, CHECK_FIRST: gl.constexpr, HAS_CAP: gl.constexpr,
    KV_KIND: gl.constexpr, FIRST: gl.constexpr, THRESHOLD: gl.constexpr,
    LEADS: gl.constexpr = False,
):  # fmt: skip
    """Turn raw products with the keys of `tile` into weights.

    With KEY_SLOPE, products contain the slope of the score function times the column.

    Over a float8 cache, `k_factor` [M] scales the products of each row, and the weights and
    `row_sum` are relative to 2 ** (row_max - WEIGHT_EXPONENT). With LEADS, `row_max` and the
    returned factor of a tile that is not MASKED are those of `softmax_by_sign`.

    Returns:
        (weights [M, N], factor [M] of what was accumulated before, row_max, row_sum).
    """
    BLOCK_N: gl.constexpr = scores.shape[1]
    if KEY_SLOPE is not None:
        return softmax_with_slope(
            scores, scale, factor, positions, tile * BLOCK_N, heads, request, aux, row_first,
            row_last, row_max, row_sum, SCORE, MASKED, CHECK_FIRST)  # fmt: skip
    elif HAS_CAP == BOUNDED:
        weights, row_max, row_sum = bounded_softmax(
            scores, factor, soft_cap, row_first, row_last, tile * BLOCK_N, row_max, row_sum, MASKED,
            CHECK_FIRST, FIRST)  # fmt: skip
        return weights, 1.0, row_max, row_sum
    else:
        if KV_KIND != KV_PLAIN:
            if SCORE is not None or HAS_CAP:
                scores = scores * k_factor[:, None]
        if SCORE is not None:
            keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
            scores = apply_function(
                scores, scale, factor, soft_cap, positions[:, None], keys[None, :], heads[:, None],
                request, aux, SCORE, HAS_CAP, RAW_SCORE)  # fmt: skip
        else:
            scores = transform_scores(scores, factor, soft_cap, HAS_CAP)
        if MASKED:
            scores = mask_scores(scores, row_first, row_last, tile * BLOCK_N, CHECK_FIRST)
        # A score function may hide keys of any tile.
        CAN_HIDE: gl.constexpr = MASKED or SCORE is not None
        if KV_KIND != KV_PLAIN:
            if SCORE is not None:
                row_factor = gl.full([scores.shape[0]], LOG2E, gl.float32, k_factor.type.layout)
            elif HAS_CAP:
                row_factor = gl.full([scores.shape[0]], 1.0, gl.float32, k_factor.type.layout)
            else:
                row_factor = k_factor * factor
            return online_softmax_by_row(
                scores, row_factor, row_max, row_sum, WEIGHT_EXPONENT, CAN_HIDE
            )
        elif SCORE is not None and not RAW_SCORE:
            return online_softmax(scores, LOG2E, row_max, row_sum, CAN_HIDE, False)
        elif LEADS and not CAN_HIDE:
            return softmax_by_sign(
                scores, 1.0 if HAS_CAP else factor, row_max, row_sum, THRESHOLD
            )  # fmt: skip
        else:
            return online_softmax(
                scores, factor, row_max, row_sum, CAN_HIDE, HAS_CAP, THRESHOLD, LEADS
            )  # fmt: skip


@gluon.jit
def multiply_parts(q_operand, k_ring, stage, zeros, KEY_PARTS: gl.constexpr):
    """Issue the product of queries with the keys of a stage, both divided into parts.

    Args:
        q_operand: tuple of KEY_PARTS parts [M, width], or that of `keep_queries`.
        k_ring: [STAGES * KEY_PARTS, N, width] in shared memory.
        zeros: [M, N] in the layout of the result.
    """
    scores = zeros
    if len(q_operand) == KEY_PARTS:
        for part in gl.static_range(KEY_PARTS):
            scores = warpgroup_mma(
                q_operand[part],
                k_ring.index(stage * KEY_PARTS + part).permute((1, 0)),
                scores,
                use_acc=part > 0,
                is_async=True,
            )
    else:
        second = k_ring.index(stage * KEY_PARTS + 1)
        keys = k_ring.index(stage * KEY_PARTS).permute((1, 0))
        scores = warpgroup_mma(q_operand[0], keys, scores, use_acc=False, is_async=True)
        keys = second.slice(0, 16, 1).permute((1, 0))
        scores = warpgroup_mma(q_operand[1], keys, scores, is_async=True)
        keys = second.slice(16, 16, 1).permute((1, 0))
        scores = warpgroup_mma(q_operand[2], keys, scores, is_async=True)
        keys = second.slice(32, 32, 1).permute((1, 0))
        scores = warpgroup_mma(q_operand[3], keys, scores, is_async=True)
        keys = k_ring.index(stage * KEY_PARTS + 2).permute((1, 0))
        scores = warpgroup_mma(q_operand[4], keys, scores, is_async=True)
    return scores


@gluon.jit
def keep_queries(first, second, third, LAYOUT: gl.constexpr):
    """Load 80 elements of queries in three parts of 64 to registers; return the operand.

    Products of 64 keys read as many bytes of queries as of keys from shared memory, together as
    much as it delivers. With 16 more elements, three consumers need local memory.

    Returns:
        Elements [0, 64) and [64, 80) in registers, and [80, 96), [96, 128) and [128, 192) in shared
        memory.
    """
    return (
        first.load(LAYOUT),
        second.slice(0, 16, 1).load(LAYOUT),
        second.slice(16, 16, 1),
        second.slice(32, 32, 1),
        third,
    )


@gluon.jit
def overlapped_step(
    q_operand, k_ring, v_ring, k_full, k_empty, v_full, v_empty, acc, weights, row_max, row_sum,
    step, tile, row_first, row_last, factor, k_factor, soft_cap, scale, positions, heads, request,
    aux, slopes, column_tile, SCORE: gl.constexpr, RAW_SCORE: gl.constexpr, KEY_SLOPE: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr, CHECK_FIRST: gl.constexpr, HAS_CAP: gl.constexpr,
    P_LAYOUT: gl.constexpr, KV_KIND: gl.constexpr, ELEMENTS: gl.constexpr, COPIED: gl.constexpr,
    PART: gl.constexpr, KEY_PARTS: gl.constexpr, THRESHOLD: gl.constexpr,
    V_COLUMNS: gl.constexpr = 0, V_OFFSET: gl.constexpr = 0, SUMS: gl.constexpr = False,
    LEADS: gl.constexpr = False,
):  # fmt: skip
    """Multiply by the keys of `tile` and by the values of the tile before it, then do the softmax.

    With KEY_SLOPE, `slopes` is `slope_operand` and `column_tile` has `column_numbers`. Products
    with keys read ELEMENTS of a head. With a PART of at least 0 the consumers share the query rows,
    `q_operand` has a leading dimension of 1, and `acc` has this part of the value elements.
    COPIED: `cp.async` fills the rings. With V_COLUMNS, values are in parts (`value_columns`), and
    with SUMS, sums of weights are columns of `acc`, and `row_sum` stays as it is.

    Returns:
        (acc, packed weights of `tile`, row_max, row_sum).
    """
    ROWS: gl.constexpr = acc.shape[0]
    DTYPE: gl.constexpr = k_ring.dtype
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    S_LAYOUT: gl.constexpr = row_last.type.layout.parent
    # Three consumers overlap with each other. With two, the softmax overlaps with P @ V, where it
    # is short enough for that.
    ORDERED: gl.constexpr = (LEADS and KEY_PARTS == 1) or (
        V_COLUMNS > 0 and THRESHOLD == 0 and HAS_CAP != BOUNDED
    )
    stage = step % STAGES
    parity = (step // STAGES) & 1
    v_stage = (step - 1) % STAGES
    if PART >= 0:
        hidden = hidden_zero(step)
        q_operand = q_operand.index(hidden)
        if STAGES == 1:
            stage = hidden
            v_stage = hidden
    v_parity = ((step - 1) // STAGES) & 1
    # Wait for the TMA loads of this tile's keys, then issue Q @ K^T.
    wait_for_tile(k_full, stage, parity, COPIED)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    if KEY_PARTS == 1:
        scores = multiply_keys(q_operand, k_ring.index(stage), zeros, ELEMENTS)
    else:
        scores = multiply_parts(q_operand, k_ring, stage, zeros, KEY_PARTS)
    if KEY_SLOPE is not None:
        scores = warpgroup_mma(slopes, column_tile[0].permute((1, 0)), scores, is_async=True)
    # Wait for the TMA loads of the previous tile's values, then issue P @ V behind it.
    wait_for_tile(v_full, v_stage, v_parity, COPIED)
    if V_COLUMNS > 0:
        acc = multiply_value_parts(weights, v_ring, v_stage, acc, V_COLUMNS, STAGES, V_OFFSET)
    else:
        acc = multiply_values(
            unpack_weights(weights, DTYPE, P_LAYOUT), v_ring.index(v_stage), acc, PART
        )
    # One group may stay in flight: Q @ K^T is complete, P @ V overlaps with the softmax.
    scores = warpgroup_mma_wait(1, deps=[scores])
    if not ORDERED:
        mbarrier.arrive(k_empty.index(stage), count=1)
    probs, acc_scale, row_max, new_sum = weigh_tile(
        scores, tile, row_first, row_last, row_max, row_sum, factor, k_factor, soft_cap, scale,
        positions, heads, request, aux, SCORE, RAW_SCORE, KEY_SLOPE, MASKED, CHECK_FIRST, HAS_CAP,
        KV_KIND, False, THRESHOLD, LEADS)  # fmt: skip
    if not SUMS:
        row_sum = new_sum
    if ORDERED:
        probs = before_wait(probs)
    # P @ V is complete: its stage is free, and the accumulator may be rescaled.
    acc = warpgroup_mma_wait(0, deps=[acc])
    if ORDERED:
        # An arrival synchronizes the warps, which would delay the softmax.
        mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    PACKED_EARLY: gl.constexpr = LEADS or (V_COLUMNS > 0 and THRESHOLD > 0)
    if PACKED_EARLY:
        # Before the branch of `rescale`, ptxas packs weights between the exponentials.
        packed = pack_weights(probs, DTYPE)
    if HAS_CAP != BOUNDED:
        if THRESHOLD > 0:
            acc = rescale(acc, acc_scale)
        else:
            acc = acc * gl.convert_layout(acc_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
    if not PACKED_EARLY:
        packed = pack_weights(probs, DTYPE)
    return acc, packed, row_max, row_sum
