"""Online softmax without row maxima: a logit above its row's reference shows in a sign.

The difference of a logit and the reference is what the exponential needs anyway. The signs of a
thread's logits are combined three at a time: 32 instructions and no exchange between threads, where
maxima take 64 and two exchanges.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import exp2
from attnlib.ops.triton.hopper.kernels.lanes import lane_sums, spread

__all__ = ["lane_references", "row_references", "softmax_by_sign"]


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
    wide = spread(references, N, LAYOUT)
    logits, wide, factors = gl.inline_asm_elementwise(
        ASM,
        CONSTRAINTS,
        [scores * factor - wide, wide],
        (gl.float32, gl.float32, gl.float32),
        True,
        ELEMENTS,
    )
    weights = exp2(logits)
    references = gl.convert_layout(_first_elements(wide), LANES)
    factors = gl.convert_layout(_first_elements(factors), LANES)
    return weights, factors, references, row_sum * factors + lane_sums(weights)
