"""Online softmax on WGMMA accumulators, in base 2.

Scores stay raw products q . k until they are exponentiated, so that the scale and the change of
base cost one multiplication together. Only a soft cap turns them into logits earlier.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attnlib.ops.triton.hopper.kernels.compat import exp2

__all__ = [
    "LN2", "LOG2E", "MOST_EXPONENT", "add_sink", "apply_function", "bounded_softmax",
    "column_numbers", "lane_references", "lane_sums", "mask_scores", "online_softmax",
    "online_softmax_by_row", "rescale", "row_references", "score_factor", "slope_operand",
    "softmax_by_sign", "softmax_with_slope", "transform_scores",
]  # fmt: skip

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
MOST_EXPONENT: gl.constexpr = gl.constexpr(43.0)
"""Logarithm of the largest weight of `bounded_softmax`. With caps of at most 64, its least weight,
e ** (43 - 2 * 64), is a normal float32."""

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)


@gluon.jit
def score_factor(scale, soft_cap, HAS_CAP: gl.constexpr):
    """Return the factor of raw products: in the tanh of the soft cap, else in the softmax."""
    factor = scale * LOG2E
    if HAS_CAP:
        factor = scale * (2.0 * LOG2E) / soft_cap
    return factor


@gluon.jit
def transform_scores(scores, factor, soft_cap, HAS_CAP: gl.constexpr):
    """Return base-2 logits if there is a soft cap, and the raw products unchanged if not."""
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is exact at both infinities.
        exp_2x = exp2(scores * factor)
        scores = (soft_cap - (2.0 * soft_cap) / (exp_2x + 1.0)) * LOG2E
    return scores


@gluon.jit
def apply_function(
    scores, scale, factor, soft_cap, positions, keys, heads, request, aux, SCORE: gl.constexpr,
    HAS_CAP: gl.constexpr, RAW_SCORE: gl.constexpr = False,
):  # fmt: skip
    """Return the scores after scale, soft cap and score function (M3).

    They are raw products as before with RAW_SCORE, otherwise in natural units. `positions`, `keys`
    and `heads` broadcast with the scores; `factor` is that of `score_factor`.
    """
    if RAW_SCORE:
        changed = SCORE(scores, positions, keys, heads, request, aux, 1.0 / scale)
    else:
        if HAS_CAP:
            logits = soft_cap - (2.0 * soft_cap) / (exp2(scores * factor) + 1.0)
        else:
            logits = scores * scale
        changed = SCORE(logits, positions, keys, heads, request, aux)
    return changed.to(gl.float32)


@gluon.jit
def mask_scores(scores, row_first, row_last, tile_start, CHECK_FIRST: gl.constexpr):
    """Set the scores [M, N] of keys outside [row_first, row_last) to -inf."""
    # Column 8 i + 2 j + k of a result of WGMMA belongs to thread j of a row. Its limits minus 2 j
    # are compared with 8 i + k, which are constants: one instruction per score instead of four.
    M: gl.constexpr = scores.shape[0]
    N: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = scores.type.layout
    parts = gl.reshape(scores, [M, N // 8, 4, 2])
    PARTS: gl.constexpr = parts.type.layout
    ROWS_PARTS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, PARTS))
    LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, PARTS)))
    PAIRS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
    part = gl.arange(0, N // 8, gl.SliceLayout(0, ROWS_PARTS))
    keys = 8 * part[None, :, None, None] + gl.arange(0, 2, PAIRS)[None, None, None, :]
    start = tile_start + 2 * gl.arange(0, 4, LANES)[None, None, :, None]
    last = gl.convert_layout(row_last, gl.SliceLayout(1, ROWS_PARTS))
    visible = keys < last[:, None, None, None] - start
    if CHECK_FIRST:
        first = gl.convert_layout(row_first, gl.SliceLayout(1, ROWS_PARTS))
        visible = visible & (keys >= first[:, None, None, None] - start)
    parts = gl.where(visible, parts, float("-inf"))
    return gl.convert_layout(gl.reshape(parts, [M, N]), LAYOUT)


@gluon.jit
def online_softmax(
    scores, factor, row_max, row_sum, MASKED: gl.constexpr, HAS_CAP: gl.constexpr,
    THRESHOLD: gl.constexpr = 0, LEADS: gl.constexpr = False,
):  # fmt: skip
    """Add one tile of scores [M, N] to the running softmax.

    Args:
        scores: raw products, or base-2 logits with HAS_CAP.
        factor: as returned by `score_factor`.
        row_max: [M], largest base-2 logit so far; -inf before the first visible key.
        row_sum: [M], sum of weights relative to `row_max`; with THRESHOLD `lane_sums` of them.
        MASKED: rows may still have no visible key.
        THRESHOLD: `row_max` follows the largest logit once that exceeds it by more than this, so
            that sums are rarely rescaled (FlashAttention-4). Weights are at most 2 ** THRESHOLD.
        LEADS: `row_max` is at least the largest logit, and where it changes, THRESHOLD more, as
            `softmax_by_sign` needs it. Weights are at most 1.

    Returns:
        (weights [M, N], factor [M] of what was accumulated before, new row_max, new row_sum).
    """
    if HAS_CAP:
        weight_factor = 1.0
    else:
        weight_factor = factor
    if LEADS:
        tile_max = gl.max(scores, 1) * weight_factor
        new_max = gl.where(tile_max > row_max, tile_max + THRESHOLD, row_max)
    elif THRESHOLD > 0:
        tile_max = gl.max(scores, 1) * weight_factor
        new_max = gl.where(tile_max > row_max + THRESHOLD, tile_max, row_max)
    else:
        new_max = gl.maximum(row_max, gl.max(scores, 1) * weight_factor)
    finite_max = new_max
    if MASKED:
        # -inf - -inf is NaN: rows without a visible key are measured from 0.
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * weight_factor - finite_max[:, None])
    acc_scale = exp2(row_max - finite_max)
    if THRESHOLD > 0:
        row_sum = _add_lane_sums(row_sum, acc_scale, weights)
    else:
        row_sum = row_sum * acc_scale + gl.sum(weights, 1)
    return weights, acc_scale, new_max, row_sum


@gluon.constexpr_function
def _follow_asm(elements, lead):
    """Return PTX that raises the references of the rows of a warp where a logit of one of them is
    not negative, and lowers the logits by as much.

    Operands: logits, references, factors of what was accumulated; then the inputs of the first
    two. Of references and factors, elements 0 and 2 are those of the two rows. A warp whose logits
    are all negative executes none of it after the branch.
    """
    reference, factor = elements, 2 * elements
    rows = [[i + j for i in range(0, elements, 4) for j in (first, first + 1)] for first in (0, 2)]
    lines = [
        ".reg .b32 signs, other_signs;",
        ".reg .f32 most, other, change;",
        ".reg .pred p, rises;",
        # Two chains, so that each instruction need not wait for the one before it.
        "and.b32 signs, $0, $1;",
        "and.b32 other_signs, $2, $3;",
    ]
    for i in range(4, elements, 4):
        lines.append(f"lop3.b32 signs, signs, ${i}, ${i + 1}, 0x80;")
        lines.append(f"lop3.b32 other_signs, other_signs, ${i + 2}, ${i + 3}, 0x80;")
    lines += [
        "and.b32 signs, signs, other_signs;",
        "setp.ge.s32 p, signs, 0;",
        f"setp.eq.or.b32 p, ${reference}, 0x80000000, p;",
        f"setp.eq.or.b32 p, ${reference + 2}, 0x80000000, p;",
        "vote.sync.any.pred rises, p, 0xffffffff;",
        f"mov.f32 ${factor}, 0f3F800000;",
        f"mov.f32 ${factor + 2}, 0f3F800000;",
        "@!rises bra.uni DONE;",
    ]
    for row, cells in zip((0, 2), rows, strict=True):
        lines.append(f"max.f32 most, ${cells[0]}, ${cells[1]};")
        lines += [f"max.f32 most, most, ${i};" for i in cells[2:]]
        for lane in (1, 2):
            lines.append(f"shfl.sync.bfly.b32 other, most, {lane}, 31, 0xffffffff;")
            lines.append("max.f32 most, most, other;")
        lines += [
            f"setp.eq.b32 p, ${reference + row}, 0x80000000;",
            f"add.f32 change, most, {lead}.0;",
            # All rows of the warp rise with the first one, so that they do not branch in turn.
            "max.f32 other, change, 0f00000000;",
            "selp.f32 change, change, other, p;",
            "neg.f32 other, change;",
            f"ex2.approx.ftz.f32 ${factor + row}, other;",
            f"selp.f32 ${factor + row}, 0f00000000, ${factor + row}, p;",
            f"add.f32 ${reference + row}, ${reference + row}, change;",
        ]
        lines += [f"sub.f32 ${i}, ${i}, change;" for i in cells]
    lines.append("DONE:")
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _follow_constraints(elements):
    return ",".join(["=f"] * (3 * elements) + [str(i) for i in range(2 * elements)])


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.jit
def _spread(values, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Return values [M, 4] of the threads of each row for their elements [M, N] of a result."""
    M: gl.constexpr = values.shape[0]
    # -0.0 + x is x, also for -0.0.
    parts = gl.reshape(gl.full([M, N], -0.0, gl.float32, LAYOUT), [M, N // 8, 4, 2])
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
    values = gl.convert_layout(values, LANES)
    parts += gl.expand_dims(gl.expand_dims(values, 1), 3)
    return gl.convert_layout(gl.reshape(parts, [M, N]), LAYOUT)


@gluon.jit
def _first_elements(values):
    """Return the first element [M, 4] of each thread and row of values [M, N]."""
    M: gl.constexpr = values.shape[0]
    N: gl.constexpr = values.shape[1]
    first, _ = gl.split(gl.reshape(values, [M, N // 8, 4, 2]))
    for bit in gl.static_range(_log2(N // 8)):
        halves = gl.reshape(first, [M, 2, N // 16 >> bit, 4])
        first, _ = gl.split(gl.permute(halves, (0, 2, 3, 1)))
    return gl.reshape(first, [M, 4])


@gluon.jit
def lane_references(row_max, LAYOUT: gl.constexpr):
    """Return row_max [M] as references [M, 4] of `softmax_by_sign`, in the layout of `lane_sums`.

    -0.0 stands for -inf: logits minus it are the logits.
    """
    M: gl.constexpr = row_max.shape[0]
    row_max = gl.where(row_max == float("-inf"), -0.0, row_max + 0.0)
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, LAYOUT))
    return gl.full([M, 4], -0.0, gl.float32, LAYOUT) + row_max[:, None]


@gluon.jit
def row_references(references, LAYOUT: gl.constexpr):
    """Return the row_max [M] of references [M, 4]."""
    row_max = gl.convert_layout(gl.max(references, 1), LAYOUT)
    return gl.where(row_max.to(gl.int32, bitcast=True) == -(2**31), float("-inf"), row_max)


@gluon.jit
def softmax_by_sign(scores, factor, references, row_sum, LEAD: gl.constexpr):
    """Add one unmasked tile of scores [M, N] to the running softmax, without its row maxima.

    A logit above its row's reference shows in the sign of their difference, which the exponential
    needs anyway. The signs of a thread's logits are combined three at a time: 32 instructions and
    no exchange between threads, where maxima take 64 and two exchanges. Only then are maxima
    computed, and the references of all rows of the warp rise to LEAD more than them, unless they
    are above that. Weights are at most 1.

    Args:
        factor: of the scores to base-2 logits.
        references: [M, 4], as returned by `lane_references`.
        row_sum: [M, 4], as returned by `lane_sums`.

    Returns:
        (weights [M, N], factor [M, 4] of what was accumulated before, references, new row_sum).
    """
    N: gl.constexpr = scores.shape[1]
    LANES: gl.constexpr = row_sum.type.layout
    ELEMENTS: gl.constexpr = N // 2
    ASM: gl.constexpr = _follow_asm(ELEMENTS, LEAD)
    CONSTRAINTS: gl.constexpr = _follow_constraints(ELEMENTS)
    LAYOUT: gl.constexpr = scores.type.layout
    wide = _spread(references, N, LAYOUT)
    logits, wide, factors = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [scores * factor - wide, wide], (gl.float32, gl.float32, gl.float32),
        True, ELEMENTS)  # fmt: skip
    weights = exp2(logits)
    references = gl.convert_layout(_first_elements(wide), LANES)
    factors = gl.convert_layout(_first_elements(factors), LANES)
    return weights, factors, references, row_sum * factors + lane_sums(weights)


@gluon.jit
def lane_sums(weights):
    """Return the sums [M, 4] of weights [M, N] of each of the 4 threads that hold a row.

    Added across threads once per query tile instead of once per tile of keys.
    """
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(gl.reshape(weights, [M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def _add_lane_sums(row_sum, acc_scale, weights):
    """Return `row_sum` [M, 4] times `acc_scale` [M], plus the `lane_sums` of a tile of weights."""
    sums = lane_sums(weights)
    factors = gl.convert_layout(acc_scale, gl.SliceLayout(1, sums.type.layout))[:, None]
    return row_sum * factors + sums


@gluon.constexpr_function
def _rescale_asm(elements):
    """Return PTX that multiplies the elements of a thread by their factors.

    A thread has pairs of elements of two rows in turn. The branch is that of a whole warp.
    """
    lines = [
        ".reg .pred p, q;",
        f"setp.neu.f32 p, ${2 * elements}, 0f3F800000;",
        f"setp.neu.or.f32 p, ${2 * elements + 2}, 0f3F800000, p;",
        "vote.sync.any.pred q, p, 0xffffffff;",
        "@!q bra.uni DONE;",
        *(f"mul.f32 ${i}, ${i}, ${2 * elements + i};" for i in range(elements)),
    ]
    return "{ " + " ".join(lines) + " DONE: }"


@gluon.constexpr_function
def _rescale_constraints(elements):
    return ",".join(["=f"] * elements + [str(i) for i in range(elements)] + ["f"] * elements)


@gluon.jit
def rescale(acc, acc_scale):
    """Return acc [M, N], an accumulator of WGMMA, times acc_scale [M], or [M, 4] by thread.

    A warp whose factors are all 1 skips the products.
    """
    ELEMENTS: gl.constexpr = acc.shape[1] // 2
    ASM: gl.constexpr = _rescale_asm(ELEMENTS)
    CONSTRAINTS: gl.constexpr = _rescale_constraints(ELEMENTS)
    LAYOUT: gl.constexpr = acc.type.layout
    if len(acc_scale.shape) == 2:
        factors = _spread(acc_scale, 2 * ELEMENTS, LAYOUT)
    else:
        factors = gl.convert_layout(acc_scale, gl.SliceLayout(1, LAYOUT))[:, None]
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [acc, factors], gl.float32, True, ELEMENTS)


@gluon.jit
def _tanh(x):
    """Return tanh(x) with a relative error of at most 2 ** -11."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def bounded_softmax(
    scores, factor, soft_cap, row_first, row_last, tile_start, row_max, row_sum,
    MASKED: gl.constexpr, CHECK_FIRST: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Cap, mask and exponentiate one tile of raw products [M, N], without a running maximum.

    Logits are at most `soft_cap`, so that weights relative to the maximum of the first tile are
    finite, and nothing that was accumulated has to be rescaled. The reference of a row is at least
    MOST_EXPONENT below the cap, so that its weights and their sums fit in float32 and bfloat16.

    Args:
        factor: as returned by `score_factor`.
        row_max: [M], base-2 reference of the row; not used with FIRST.
        row_sum: [M], sum of weights relative to `row_max`.
        FIRST: the tile is the first one of its rows.

    Returns:
        (weights [M, N], row_max, new row_sum).
    """
    # `factor` is that of exp2(2 x); the scaled scores are the arguments of tanh.
    logits = _tanh(scores * (factor * (0.5 * LN2))) * (soft_cap * LOG2E)
    if MASKED:
        logits = mask_scores(logits, row_first, row_last, tile_start, CHECK_FIRST)
    if FIRST:
        row_max = gl.maximum(gl.max(logits, 1), (soft_cap - MOST_EXPONENT) * LOG2E)
    weights = exp2(logits - row_max[:, None])
    return weights, row_max, row_sum + gl.sum(weights, 1)


@gluon.jit
def online_softmax_by_row(
    scores, row_factor, row_max, row_sum, exponent, MASKED: gl.constexpr,
    BY_LANE: gl.constexpr = False,
):  # fmt: skip
    """Add one tile of scores [M, N] to the running softmax, as `online_softmax`.

    Args:
        row_factor: [M], factor of the scores of each row to base-2 logits.
        exponent: weights and `row_sum` are relative to 2 ** (row_max - exponent).
        BY_LANE: `row_sum` is that of `lane_sums`.
    """
    new_max = gl.maximum(row_max, gl.max(scores, 1) * row_factor)
    finite_max = new_max
    if MASKED:
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * row_factor[:, None] - (finite_max - exponent)[:, None])
    acc_scale = exp2(row_max - finite_max)
    if BY_LANE:
        row_sum = _add_lane_sums(row_sum, acc_scale, weights)
    else:
        row_sum = row_sum * acc_scale + gl.sum(weights, 1)
    return weights, acc_scale, new_max, row_sum


@gluon.jit
def column_numbers(BLOCK_N: gl.constexpr):
    """Return the numbers of the BLOCK_N columns in shared memory, as an operand of WGMMA."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 16], gl.bfloat16)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))[:, None]
    # Integers up to 256 are exact in bfloat16.
    numbers = (gl.zeros([BLOCK_N, 16], gl.int32, LAYOUT) + columns).to(gl.bfloat16)
    tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, 16], SHARED)
    tile.store(numbers)
    # WGMMA reads shared memory through the async proxy.
    fence_async_shared()
    return tile


@gluon.jit
def slope_operand(slope):
    """Return float32 slopes [M, 1] as an operand of WGMMA [M, 16], the sum of three bfloat16.

    Its product with `column_numbers` is the slope times the column, with the precision of float32.
    """
    LAYOUT: gl.constexpr = slope.type.layout
    part = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    high = slope.to(gl.bfloat16)
    rest = slope - high.to(gl.float32)
    middle = rest.to(gl.bfloat16)
    low = (rest - middle.to(gl.float32)).to(gl.bfloat16)
    M: gl.constexpr = slope.shape[0]
    zeros = gl.zeros([M, 16], gl.bfloat16, LAYOUT)
    parts = gl.where(part == 2, low, zeros)
    parts = gl.where(part == 1, middle, parts)
    return gl.where(part == 0, high, parts)


@gluon.jit
def softmax_with_slope(
    scores, scale, factor, positions, tile_start, heads, request, aux, row_first, row_last, row_max,
    row_sum, SCORE: gl.constexpr, MASKED: gl.constexpr, CHECK_FIRST: gl.constexpr,
):  # fmt: skip
    """Mask and softmax of a tile whose score function adds a slope times the key's position.

    As `apply_function` with RAW_SCORE, `mask_scores` and `online_softmax`, but the slope times the
    column is part of the products already (`slope_operand`), and SCORE is called once per row, for
    the first key of the tile.
    """
    LAYOUT: gl.constexpr = scores.type.layout
    if MASKED:
        scores = mask_scores(scores, row_first, row_last, tile_start, CHECK_FIRST)
    first_key = (tile_start + gl.arange(0, 1, gl.SliceLayout(0, LAYOUT)))[None, :]
    M: gl.constexpr = scores.shape[0]
    zeros = gl.zeros([M, 1], gl.float32, LAYOUT)
    first = SCORE(zeros, positions[:, None], first_key, heads[:, None], request, aux, 1.0 / scale)
    offset = gl.max(first.to(gl.float32), 1) * factor
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor + offset)
    # -inf - -inf is NaN: rows without a visible key are measured from 0.
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exp2(scores * factor + (offset - finite_max)[:, None])
    acc_scale = exp2(row_max - finite_max)
    return weights, acc_scale, new_max, row_sum * acc_scale + gl.sum(weights, 1)


@gluon.jit
def add_sink(row_max, row_sum, sink):
    """Add the sink's logit to the denominator of each row, once per row (M4).

    Returns:
        (finite row maximum, factor of the accumulated values, new row_sum).
    """
    sink = sink.to(gl.float32) * LOG2E
    new_max = gl.maximum(row_max, sink)
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    acc_scale = exp2(row_max - finite_max)
    return finite_max, acc_scale, row_sum * acc_scale + exp2(sink - finite_max)
