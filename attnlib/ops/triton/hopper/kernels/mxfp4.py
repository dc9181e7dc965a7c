"""4-bit floats with a power of two for each 32 elements (mxfp4), for the decode of one warp.

Word i of a head of 128 elements holds the elements 4 i to 4 i + 3, and eight neighboring words are
a group. Parts of a head, each an operand of a product, are its groups: of a tile of `ldmatrix`, a
thread has the words of all groups, so that it only orders its registers. No element is multiplied
by its scale, which may be outside of float16: those of keys multiply the products of their groups,
those of values the weights. Elements have the factor 2^-14 (`nvfp4.e2m1_ptx`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.nvfp4 import e2m1_ptx

__all__ = ["largest_power", "mxfp4_elements", "mxfp4_keys", "mxfp4_values", "power_of_group"]


@gluon.constexpr_function
def _parts_ptx():
    """Return PTX that converts two words in $4 to four pairs of float16, $0 to $3."""
    code = "".join(e2m1_ptx(part, f"${part}") for part in range(4))
    return "{ .reg .b32 t, u; " + code + "}"


@gluon.jit
def _numbers(words):
    """Return the numbers of the words times 2^-14, [..., 2, 2]: number i + 2 j of each word."""
    x0, x1, x2, x3 = gl.inline_asm_elementwise(
        _parts_ptx(),
        "=r,=r,=r,=r,r",
        [words],
        (gl.float16, gl.float16, gl.float16, gl.float16),
        True,
        2,
    )
    return gl.join(gl.join(x0, x1), gl.join(x2, x3))


@gluon.jit
def _groups(numbers, LAYOUT: gl.constexpr):
    """Return four operands of numbers [rows, columns, 2, 2], by the two bits of their group."""
    low, high = gl.split(numbers)
    first, second = gl.split(low)
    third, fourth = gl.split(high)
    return (
        gl.convert_layout(first, LAYOUT, assert_trivial=True),
        gl.convert_layout(second, LAYOUT, assert_trivial=True),
        gl.convert_layout(third, LAYOUT, assert_trivial=True),
        gl.convert_layout(fourth, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def mxfp4_keys(words):
    """Convert words [keys, words] to the float16 elements of four groups, [keys, 32] each, in the
    order of `mxfp4_elements`."""
    KEYS: gl.constexpr = words.shape[0]
    gl.static_assert(words.shape[1] == 32, "four groups of 32 elements")
    LAYOUT: gl.constexpr = words.type.layout
    numbers = gl.reshape(_numbers(words), [KEYS, 2, 2, 8, 2, 2])
    ordered = gl.permute(numbers, (0, 5, 4, 3, 2, 1))
    return _groups(gl.reshape(ordered, [KEYS, 32, 2, 2]), LAYOUT)


@gluon.jit
def mxfp4_values(words):
    """Convert words [words, keys] to the float16 elements of four groups, [32, keys] each, in the
    order of `mxfp4_elements`."""
    KEYS: gl.constexpr = words.shape[1]
    gl.static_assert(words.shape[0] == 32, "four groups of 32 elements")
    LAYOUT: gl.constexpr = words.type.layout
    numbers = gl.reshape(_numbers(words), [2, 2, 8, KEYS, 2, 2])
    ordered = gl.permute(numbers, (5, 4, 2, 3, 1, 0))
    return _groups(gl.reshape(ordered, [32, KEYS, 2, 2]), LAYOUT)


@gluon.jit
def mxfp4_elements(index, group: gl.constexpr):
    """Return the elements of a head in the order of a group."""
    return 32 * group + index % 8 * 4 + index // 8


@gluon.jit
def power_of_group(scales, GROUP: gl.constexpr):
    """Return the scale of a group in float32, of four e8m0 bytes in an int32; 0 for the byte 0."""
    bits = (scales >> (8 * GROUP)) & 0xFF
    return gl.where(bits == 255, float("nan"), (bits << 23).to(gl.float32, bitcast=True))


@gluon.jit
def largest_power(scales):
    """Return the largest of the four scales."""
    first = gl.maximum(power_of_group(scales, 0), power_of_group(scales, 1))
    return gl.maximum(first, gl.maximum(power_of_group(scales, 2), power_of_group(scales, 3)))
