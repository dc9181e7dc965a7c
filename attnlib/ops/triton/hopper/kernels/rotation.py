"""Rotation of heads in registers (P15), with the arithmetic and the order of `ops.hadamard`.

Elements of a head are spread over parts, each a tensor [rows, words]. Their order permutes the bits
of their numbers, so that each level of sums and differences takes neighbors in one bit of the
position, or two parts. `SIGNS` has bit i where element i changes its sign, and bit D.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.kernels.hadamard import LIMIT, largest_number, sign_word, unit
from attnlib.ops.triton.kernels.quant import KV_INT4, KV_MXFP4, KV_NVFP4, KV_PLAIN

__all__ = [
    "first_half",
    "in_order",
    "key_group_levels",
    "key_levels",
    "key_part_levels",
    "rotate_parts",
    "rotate_rows",
    "twice",
    "value_levels",
    "value_part_levels",
]


@gluon.constexpr_function
def _levels(bits, size):
    """Return the levels of heads of this size in order. bits[i] is the place of bit i of an
    element: a bit of the position, or -1 - a bit of the part."""
    block = size & -size
    return bits[: block.bit_length() - 1][::-1]


@gluon.constexpr_function
def _places(element):
    """Return the bits of the positions by the bit of the element that they are; `element[b]` is the
    element at position 2^b."""
    return tuple(element.index(1 << bit) for bit in range(len(element)))


@gluon.constexpr_function
def key_levels(width, size):
    """Return the levels of queries [rows, width] in the order of `quantized.query_columns`."""
    line = min(width // 2, 64)
    found = []
    for bit in range(width.bit_length() - 1):
        word = (1 << bit) // 2 % line
        place = (word % 4) * (line // 4) + word // 4
        found.append((1 << bit) // (2 * line) * (2 * line) + place * 2 + (1 << bit) % 2)
    return _levels(_places(found), size)


@gluon.constexpr_function
def key_part_levels(words, size, kind):
    """Return the levels of queries in the parts of `warp_operands`, [rows, words] each."""
    if kind == KV_INT4 or kind == KV_NVFP4 or kind == KV_MXFP4:
        return value_part_levels(words, size, kind)
    return _levels((0, -1, *range(1, words.bit_length() - 1)), size)


@gluon.constexpr_function
def key_group_levels(words, size):
    """Return the levels of queries in four groups in the order of `int4.int4_query_columns`."""
    return _levels((0, *range(3, words.bit_length() - 1), 1, 2, -1, -2), size)


@gluon.constexpr_function
def value_levels(width, size):
    """Return the levels of outputs [rows, width] in the order of their elements."""
    return _levels(tuple(range(width.bit_length() - 1)), size)


@gluon.jit
def in_order(x, KIND: gl.constexpr):
    """Return outputs [elements, rows] in the order of their elements, from that of
    `decode_products.value_lanes`. Registers stay what they are."""
    WIDTH: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    if KIND == KV_PLAIN:
        found = x
    elif KIND == KV_INT4:
        found = gl.permute(gl.reshape(x, [2, WIDTH // 32, 2, 8, ROWS]), (0, 2, 1, 3, 4))
    elif KIND == KV_NVFP4:
        found = gl.permute(gl.reshape(x, [2, WIDTH // 32, 2, 8, ROWS]), (1, 3, 0, 2, 4))
    else:
        found = gl.permute(gl.reshape(x, [WIDTH // 16, 2, 8, ROWS]), (0, 2, 1, 3))
    return gl.reshape(found, [WIDTH, ROWS])


@gluon.jit
def first_half(x):
    """Return the first half of the rows of `x` [rows, words]."""
    ROWS: gl.constexpr = x.shape[0]
    WORDS: gl.constexpr = x.shape[1]
    found, _ = gl.split(gl.permute(gl.reshape(x, [2, ROWS // 2, WORDS]), (1, 2, 0)))
    return found


@gluon.jit
def twice(x):
    """Return `x` [rows, words] or [rows] with all rows a second time behind them."""
    ROWS: gl.constexpr = x.shape[0]
    if len(x.shape) == 1:
        found = gl.reshape(gl.permute(gl.join(x, x), (1, 0)), [2 * ROWS])
    else:
        found = gl.reshape(gl.permute(gl.join(x, x), (2, 0, 1)), [2 * ROWS, x.shape[1]])
    return found


@gluon.constexpr_function
def value_part_levels(words, size, kind):
    """Return the levels of outputs in the parts of `warp_operands`, [rows, words] each."""
    inner = range(words.bit_length() - 1)
    if kind == KV_INT4:
        return _levels((*inner, -1, -2), size)
    if kind == KV_NVFP4:
        return _levels((-1, -2, *inner), size)
    if kind == KV_MXFP4:  # `mxfp4.mxfp4_elements`
        return _levels((3, 4, 0, 1, 2, -1, -2), size)
    return _levels((-1, *inner), size)


@gluon.jit
def _clamped(x, MOST: gl.constexpr):
    """`x` within the limits; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        "min.NaN.xorsign.abs.f32 $0, $1, $2;", "=f,f,f", [x, MOST], gl.float32, True, 1
    )


@gluon.jit
def _signed(x, elements, SIGNS: gl.constexpr, SIZE: gl.constexpr):
    """`x` [rows, words] times the signs of its elements."""
    word = gl.full(elements.shape, sign_word(SIGNS, 0), gl.int32, elements.type.layout)
    for number in gl.static_range(1, (SIZE + 31) // 32):
        word = gl.where(elements >> 5 >= number, sign_word(SIGNS, number), word)
    flip = (word >> (elements & 31)) << 31
    return (x.to(gl.int32, bitcast=True) ^ flip[None, :]).to(gl.float32, bitcast=True)


@gluon.jit
def _neighbors(x, BIT: gl.constexpr):
    """Sums and differences of the elements whose positions differ in a bit."""
    ROWS: gl.constexpr = x.shape[0]
    WORDS: gl.constexpr = x.shape[1]
    pairs = gl.reshape(x, [ROWS * (WORDS >> (BIT + 1)), 2, 1 << BIT])
    LAYOUT: gl.constexpr = pairs.type.layout
    bits = pairs.to(gl.int32, bitcast=True)
    # The bits of both elements without its own are those of the other one: one exchange of lanes.
    other = (gl.xor_sum(bits, 1)[:, None, :] ^ bits).to(gl.float32, bitcast=True)
    sign = 1.0 - 2.0 * gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))).to(gl.float32)
    # The product is exact: one rounding.
    changed = gl.reshape(other + pairs * sign[None, :, None], [ROWS, WORDS])
    return gl.convert_layout(changed, x.type.layout, assert_trivial=True)


@gluon.jit
def _level(parts, LEVEL: gl.constexpr):
    """Sums and differences of neighbors in a bit of the position, or of parts."""
    changed = ()
    if LEVEL >= 0:
        for part in gl.static_range(len(parts)):
            changed = changed + (_neighbors(parts[part], LEVEL),)
    else:
        APART: gl.constexpr = 1 << (-1 - LEVEL)
        for part in gl.static_range(len(parts)):
            if part & APART:
                changed = changed + (parts[part - APART] - parts[part],)
            else:
                changed = changed + (parts[part] + parts[part + APART],)
    return changed


@gluon.jit
def rotate_parts(
    parts,
    elements,
    SIGNS: gl.constexpr,
    SIZE: gl.constexpr,
    LEVELS: gl.constexpr,
    INVERSE: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Rotate heads.

    Args:
        parts: float32 tensors [rows, words]; elements from SIZE on are 0.
        elements: for each part, int32 [words], the elements that it has.
        LEVELS: of the order of the elements.
        INVERSE: rotate back.
        DTYPE: of the heads, to which the result is rounded.

    Returns:
        The tensors, rotated, in DTYPE.
    """
    changed = ()
    for part in gl.static_range(len(parts)):
        x = _clamped(parts[part], LIMIT)
        if not INVERSE:
            x = _signed(x, elements[part], SIGNS, SIZE)
        changed = changed + (x,)
    for level in gl.static_range(len(LEVELS)):
        changed = _level(changed, LEVELS[level])
    rotated = ()
    for part in gl.static_range(len(parts)):
        x = changed[part] * unit(SIZE)
        if INVERSE:
            x = _signed(x, elements[part], SIGNS, SIZE) + 0.0
        if DTYPE == gl.float16:  # the limits of the elements keep sums in range of other dtypes
            x = _clamped(x, largest_number(DTYPE))
        rotated = rotated + (x.to(DTYPE),)
    return rotated


@gluon.jit
def rotate_rows(
    x,
    elements,
    SIGNS: gl.constexpr,
    SIZE: gl.constexpr,
    LEVELS: gl.constexpr,
    INVERSE: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """`rotate_parts` of one part."""
    return rotate_parts((x,), (elements,), SIGNS, SIZE, LEVELS, INVERSE, DTYPE)[0]
