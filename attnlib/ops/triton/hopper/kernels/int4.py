"""The decode over int4 caches: four products for four groups of a head, each with its own scales.

Bits 4 j to 4 j + 3 of word i of a head hold element j * D / 4 + i, which belongs to group j. A
register holds two neighboring words; a few integer instructions make a pair of float16 of each
group. No element is multiplied by its scale:

- Keys: the products of each group of the keys with that of the queries are separate, and become the
  scores when they are multiplied by the scales of their keys.
- Values: the weights are multiplied by the scales of a group. The 64 rows of a WGMMA hold two
  groups, 8 rows of each alternately, and are multiplied by the weights of both groups, side by side
  in the N dimension; half of that result is used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from attnlib.ops.triton.hopper.kernels.quantized import key_layout, value_layout
from attnlib.ops.triton.kernels.page_formats import PAGE_INT4, unpack_ptx

__all__ = [
    "float32_scale",
    "int4_key_products",
    "int4_query_columns",
    "int4_result",
    "int4_value_products",
    "int4_value_rows",
    "join_halves",
    "largest_scale",
    "repeat_columns",
    "store_pairs",
    "value_pair_operand",
]


@gluon.jit
def _unpack(words):
    """Convert words to the float16 elements of the four groups."""
    ASM: gl.constexpr = unpack_ptx(PAGE_INT4, 90)
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r", [words], (gl.float16, gl.float16, gl.float16, gl.float16), True, 2
    )


@gluon.jit
def float32_scale(scales, GROUP: gl.constexpr):
    """Return the scale of a group, of four float16 in an int64."""
    bits = ((scales >> (16 * GROUP)) & 0xFFFF).to(gl.int16)
    return bits.to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def largest_scale(scales):
    """Return the largest of the four scales."""
    first = gl.maximum(float32_scale(scales, 0), float32_scale(scales, 1))
    return gl.maximum(first, gl.maximum(float32_scale(scales, 2), float32_scale(scales, 3)))


@gluon.jit
def _key_operand(x, OPERAND: gl.constexpr):
    """Order the words of a group of keys as the elements of an operand of WGMMA."""
    KEYS: gl.constexpr = x.shape[0]
    WORDS: gl.constexpr = x.shape[1]
    lines = gl.reshape(x, [KEYS, 4, WORDS // 8, 2])
    return gl.convert_layout(gl.reshape(gl.permute(lines, (0, 2, 1, 3)), [KEYS, WORDS]), OPERAND)


@gluon.jit
def int4_query_columns(WORDS: gl.constexpr, layout: gl.constexpr):
    """Return the words of a group in the order of `int4_key_products`."""
    columns = gl.arange(0, WORDS, layout)
    return columns // 2 % 4 * (WORDS // 4) + columns // 8 * 2 + columns % 2


@gluon.jit
def int4_key_products(tile, q_tile, zeros):
    """Issue the products of four groups, [keys, rows] each; `q_tile` is [4, rows, words]."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, zeros.type.layout, 2)
    x0, x1, x2, x3 = _unpack(tile.load(key_layout(tile.shape[0], tile.shape[1])))
    return (
        warpgroup_mma(
            _key_operand(x0, OPERAND),
            q_tile.index(0).permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        ),
        warpgroup_mma(
            _key_operand(x1, OPERAND),
            q_tile.index(1).permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        ),
        warpgroup_mma(
            _key_operand(x2, OPERAND),
            q_tile.index(2).permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        ),
        warpgroup_mma(
            _key_operand(x3, OPERAND),
            q_tile.index(3).permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        ),
    )


@gluon.jit
def value_pair_operand(even, odd, OPERAND: gl.constexpr):
    """Rows of two groups, 8 of each alternately, of [words, keys] each."""
    WORDS: gl.constexpr = even.shape[0]
    KEYS: gl.constexpr = even.shape[1]
    both = gl.reshape(gl.join(even, odd), [WORDS // 8, 8, KEYS, 2])
    return gl.convert_layout(gl.reshape(gl.permute(both, (0, 3, 1, 2)), [2 * WORDS, KEYS]), OPERAND)


@gluon.jit
def int4_value_products(tile, p_tile, acc0, acc1):
    """Issue the products of groups 0 and 1, and of groups 2 and 3, [2 words, 2 rows] each."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc0.type.layout, 2)
    words = tile.permute((1, 0)).load(value_layout(tile.shape[1], tile.shape[0]))
    x0, x1, x2, x3 = _unpack(words)
    ROWS: gl.constexpr = p_tile.shape[0] // 2
    first_rows = p_tile.slice(0, ROWS, 0)
    second_rows = p_tile.slice(ROWS, ROWS, 0)
    first = warpgroup_mma(
        value_pair_operand(x0, x1, OPERAND), first_rows.permute((1, 0)), acc0, is_async=True
    )
    second = warpgroup_mma(
        value_pair_operand(x2, x3, OPERAND), second_rows.permute((1, 0)), acc1, is_async=True
    )
    return first, second


@gluon.jit
def store_pairs(p_tile, p0, p1, p2, p3):
    """Store the weights [keys, rows] of four groups to `p_tile` [4 rows, keys], at once, so that
    there is no barrier between the stores."""
    KEYS: gl.constexpr = p0.shape[0]
    ROWS: gl.constexpr = p0.shape[1]
    # [keys, rows, first or second of a pair, pair]
    four = gl.join(gl.join(p0, p1), gl.join(p2, p3))
    p_tile.store(gl.reshape(gl.permute(four, (3, 2, 1, 0)), [4 * ROWS, KEYS]))


@gluon.jit
def repeat_columns(x, LAYOUT: gl.constexpr):
    """Return x [rows] twice, [2 rows], as a row of a tensor of LAYOUT."""
    both = gl.reshape(gl.permute(gl.join(x, x), (1, 0)), [2 * x.shape[0]])
    return gl.convert_layout(both, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def _own_columns(acc, LAYOUT: gl.constexpr):
    """The used half of a result: rows of the first group with its weights, others with theirs."""
    ROWS: gl.constexpr = acc.shape[1] // 2
    halves = gl.permute(gl.reshape(acc, [acc.shape[0], 2, ROWS]), (0, 2, 1))
    first, second = gl.split(halves)
    first = gl.convert_layout(first, LAYOUT)
    second = gl.convert_layout(second, LAYOUT)
    index = gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    return gl.where((index // 8 % 2 == 0)[:, None], first, second)


@gluon.jit
def join_halves(first, second, LAYOUT: gl.constexpr):
    """Return the rows of two results one after the other."""
    both = gl.join(first, second)
    joined = gl.reshape(gl.permute(both, (2, 0, 1)), [2 * first.shape[0], first.shape[1]])
    return gl.convert_layout(joined, LAYOUT)


@gluon.jit
def int4_result(acc0, acc1, LAYOUT: gl.constexpr):
    """Return the accumulated values [elements, rows] in the order of `int4_value_rows`."""
    return join_halves(_own_columns(acc0, LAYOUT), _own_columns(acc1, LAYOUT), LAYOUT)


@gluon.jit
def int4_value_rows(WIDTH: gl.constexpr, layout: gl.constexpr):
    """Return the elements of a value in the order of `int4_result`."""
    rows = gl.arange(0, WIDTH, layout)
    group = rows // (WIDTH // 2) * 2 + rows // 8 % 2
    return group * (WIDTH // 4) + rows % (WIDTH // 2) // 16 * 8 + rows % 8
