"""Keep ptxas from moving the wait for a product up, in front of the softmax that overlaps with it.

`wgmma.wait_group` depends on no registers of the softmax, so ptxas places it as early as it can:
behind the first row maxima. The exponentials then run after P @ V instead of during it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["before_wait"]


@gluon.constexpr_function
def _before_wait_asm(elements):
    """Return PTX that uses four weights of a thread: of both rows, in the middle and at the end.

    An arrival on a named barrier keeps its place before the wait. It never executes: weights are
    finite or NaN. (That they are not negative is known to ptxas, which removes such a condition.)
    Triton 3.6 to 3.9 do not use barrier 14.
    """
    used = [2 * elements - 1 - i for i in (0, 2, elements // 2, elements // 2 + 2)]
    lines = [
        ".reg .b32 bits;",
        ".reg .pred never;",
        f"and.b32 bits, ${used[0]}, ${used[1]};",
        f"and.b32 bits, bits, ${used[2]};",
        f"and.b32 bits, bits, ${used[3]};",
        "setp.eq.u32 never, bits, 0x7F800000;",  # infinity
        "@never bar.arrive 14, 256;",
    ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def _before_wait_constraints(elements):
    return ",".join(["=r"] * elements + [str(i) for i in range(elements)])


@gluon.jit
def before_wait(weights):
    """Return weights [64, N] in the layout of a WGMMA result, most of them computed before the wait
    that follows. They must not be infinite.

    They are float32, because weights that are packed before the wait make ptxas serialize the
    products: their registers are those of the operand that P @ V still reads.
    """
    ELEMENTS: gl.constexpr = weights.shape[1] // 2
    ASM: gl.constexpr = _before_wait_asm(ELEMENTS)
    CONSTRAINTS: gl.constexpr = _before_wait_constraints(ELEMENTS)
    bits = weights.to(gl.int32, bitcast=True)
    bits = gl.inline_asm_elementwise(ASM, CONSTRAINTS, [bits], gl.int32, False, ELEMENTS)
    return bits.to(gl.float32, bitcast=True)
