"""Values of the four threads that hold a row of a WGMMA result: sums and factors by thread.

Sums by thread are added across threads once per query tile instead of once per tile of keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["add_lane_sums", "lane_sums", "rescale", "spread"]


@gluon.jit
def spread(values, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Return values [M, 4] of the threads of each row for their elements [M, N] of a result."""
    M: gl.constexpr = values.shape[0]
    # -0.0 + x is x, also for -0.0.
    parts = gl.reshape(gl.full([M, N], -0.0, gl.float32, LAYOUT), [M, N // 8, 4, 2])
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
    values = gl.convert_layout(values, LANES)
    parts += gl.expand_dims(gl.expand_dims(values, 1), 3)
    return gl.convert_layout(gl.reshape(parts, [M, N]), LAYOUT)


@gluon.jit
def lane_sums(weights):
    """Return the sums [M, 4] of weights [M, N] of each of the 4 threads that hold a row.

    Added across threads once per query tile instead of once per tile of keys.
    """
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(gl.reshape(weights, [M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def add_lane_sums(row_sum, acc_scale, weights):
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
        factors = spread(acc_scale, 2 * ELEMENTS, LAYOUT)
    else:
        factors = gl.convert_layout(acc_scale, gl.SliceLayout(1, LAYOUT))[:, None]
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [acc, factors], gl.float32, True, ELEMENTS)
