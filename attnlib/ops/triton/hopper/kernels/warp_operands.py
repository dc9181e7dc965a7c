"""Operands of `mma.sync` from tiles of 8-bit and 4-bit elements, for the decode of one warp.

The rows of both products are keys or elements of values, and the columns are the query rows, at
most 8. A tile of 16-bit words is loaded by `ldmatrix` in the order of an operand, and each word
becomes parts, whose number is that of its elements:

- 8-bit elements have two parts, the lower and the upper half of a word or of a pair of words.
- 4-bit integers have four, their groups, with scales of their own.
- nvfp4 has four, neighboring elements times their scales (`nvfp4.py`); mxfp4 its groups
  (`mxfp4.py`).

Keys of 4-bit integers are not converted: their bits are the last ones of a float16, that is a
subnormal number, 2^-24 or 2^-20 times an integer from 0 to 15. The queries of the latter are
divided by 16, the scores are multiplied by 2^24, and the products start from -8 times the sum of
the queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.mxfp4 import mxfp4_elements, mxfp4_keys, mxfp4_values
from attnlib.ops.triton.hopper.kernels.quantized import (
    alternate_ptx,
    neighbors_ptx,
    query_powers,
)
from attnlib.ops.triton.hopper.kernels.rotation import key_part_levels, rotate_parts, twice
from attnlib.ops.triton.kernels.page_formats import PAGE_INT4, unpack_ptx
from attnlib.ops.triton.kernels.quant import KV_INT4, KV_MXFP4, KV_NVFP4

__all__ = [
    "PRODUCTS",
    "WarpQueries",
    "key_parts",
    "load_warp_queries",
    "num_parts",
    "transposed_weights",
    "value_elements",
    "value_parts",
]

PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
"""Layout of [keys, rows] and [elements of a value, rows]."""

_GROUPS_PTX = gl.constexpr(
    "{ .reg .b32 h; shr.u32 h, $4, 8; and.b32 $0, $4, 0x000F000F;"
    " and.b32 $1, $4, 0x00F000F0; and.b32 $2, h, 0x000F000F; and.b32 $3, h, 0x00F000F0; }"
)
"""Spreads the bits of the four groups of two words."""


@gluon.constexpr_function
def num_parts(kind):
    """Return the parts of a word."""
    return 4 if kind == KV_INT4 or kind == KV_NVFP4 or kind == KV_MXFP4 else 2


@gluon.jit
def _convert(words, ASM: gl.constexpr, KV_KIND: gl.constexpr):
    if KV_KIND == KV_INT4:
        parts = gl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [words], (gl.float16, gl.float16, gl.float16, gl.float16), True, 2
        )
    else:
        parts = gl.inline_asm_elementwise(
            ASM, "=r,=r,r", [words], (gl.float16, gl.float16), True, 2
        )
    return parts


@gluon.jit
def key_parts(words, KV_KIND: gl.constexpr):
    """Convert words [keys, words] of keys to the float16 elements of their parts."""
    if KV_KIND == KV_MXFP4:
        return mxfp4_keys(words)
    else:
        ASM: gl.constexpr = _GROUPS_PTX if KV_KIND == KV_INT4 else neighbors_ptx(KV_KIND)
        return _convert(words, ASM, KV_KIND)


@gluon.jit
def value_parts(words, KV_KIND: gl.constexpr):
    """Convert words [words, keys] of values to the float16 elements of their parts."""
    if KV_KIND == KV_MXFP4:
        return mxfp4_values(words)
    else:
        INT4: gl.constexpr = KV_KIND == KV_INT4
        ASM: gl.constexpr = unpack_ptx(PAGE_INT4, 90) if INT4 else alternate_ptx(KV_KIND)
        return _convert(words, ASM, KV_KIND)


@gluon.jit
def _key_elements(index, part: gl.constexpr, WORDS: gl.constexpr, KV_KIND: gl.constexpr):
    """Return the elements of a head in the order of a part of the keys."""
    if num_parts(KV_KIND) == 4:
        found = value_elements(index, part, WORDS, KV_KIND)
    else:
        # A pair of words holds four elements; each part has two of them.
        found = index // 2 * 4 + 2 * part + index % 2
    return found


@gluon.jit
def value_elements(index, part: gl.constexpr, WORDS: gl.constexpr, KV_KIND: gl.constexpr):
    """Return the elements of a head in the order of a part of the values."""
    if KV_KIND == KV_INT4:
        found = part * WORDS + index
    elif KV_KIND == KV_MXFP4:
        found = mxfp4_elements(index, part)
    else:
        found = num_parts(KV_KIND) * index + part
    return found


@gluon.jit
def transposed_weights(weights):
    """Return float16 weights [keys, rows], the result of a product, as the second operand of one.

    `movmatrix` transposes the 8 x 8 blocks that the registers of a warp hold.
    """
    KEYS: gl.constexpr = weights.shape[0]
    ROWS: gl.constexpr = weights.shape[1]
    blocks = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [weights], gl.float16, False, 2
    )
    blocks = gl.permute(gl.reshape(blocks, [KEYS // 8, 8, ROWS]), (0, 2, 1))
    return gl.convert_layout(
        gl.reshape(blocks, [KEYS, ROWS]), gl.DotOperandLayout(1, PRODUCTS, 2), assert_trivial=True
    )


@aggregate
class WarpQueries:
    """The query rows of a split as operands.

    Fields:
        operands: for each part, float16 [elements, rows].
        initial: for each part, the first scores [rows].
        factor: factors [rows] of the scores.
    """

    operands: Value
    initial: Value
    factor: Value


@gluon.jit
def load_warp_queries(queries, split, config):
    """Load the query rows of a split; arguments are objects of `decode_call`."""
    PARTS: gl.constexpr = num_parts(config.K_KIND)
    WORDS: gl.constexpr = config.WIDTH // PARTS
    COLUMNS: gl.constexpr = config.ROWS
    ROWS: gl.constexpr = COLUMNS // 2 if config.HALF_ROWS else COLUMNS
    GROUP: gl.constexpr = config.GROUP
    LANES: gl.constexpr = 32 // ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, WORDS // LANES], [ROWS, LANES], [1, 1], [1, 0])
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCTS)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    valid = (row < config.TILE_TOKENS * GROUP) & (row // GROUP < split.query_len)
    offsets = (split.start + row // GROUP).to(gl.int64) * queries.stride_token
    offsets += (split.kv_head * GROUP + row % GROUP).to(gl.int64) * queries.stride_head
    index = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))
    parts = ()
    places = ()
    largest = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(PARTS):
        elements = _key_elements(index, part, WORDS, config.K_KIND)
        pointers = queries.pointer + offsets[:, None] + elements[None, :]
        mask = valid[:, None] & (elements < config.D)[None, :]
        loaded = gl.load(pointers, mask=mask, other=0.0)
        parts = parts + (loaded.to(gl.float32),)
        places = places + (elements,)
        if not config.K_SIGNS:
            largest = gl.maximum(largest, gl.max(gl.abs(parts[part]), 1))
    if config.K_SIGNS:
        LEVELS: gl.constexpr = key_part_levels(WORDS, config.D, config.K_KIND)
        DTYPE: gl.constexpr = queries.pointer.dtype.element_ty
        parts = rotate_parts(parts, places, config.K_SIGNS, config.D, LEVELS, False, DTYPE)
        for part in gl.static_range(PARTS):
            largest = gl.maximum(largest, gl.max(gl.abs(parts[part].to(gl.float32)), 1))
    power, inverse = query_powers(largest)
    operands = ()
    initial = ()
    for part in gl.static_range(PARTS):
        rows = (parts[part].to(gl.float32) * power[:, None]).to(gl.float16)
        if config.HALF_ROWS:
            rows = twice(rows)  # in the place of rows without queries
        start = gl.zeros([COLUMNS], gl.float32, COLUMN)
        if config.K_KIND == KV_INT4:
            total = gl.sum(rows.to(gl.float32), 1)
            start = gl.convert_layout(total, COLUMN) * (-8.0 * 2.0**-24)
            if part % 2 == 1:
                rows = (rows.to(gl.float32) * 0.0625).to(gl.float16)
        operand = gl.convert_layout(gl.permute(rows, (1, 0)), gl.DotOperandLayout(1, PRODUCTS, 2))
        operands = operands + (operand,)
        initial = initial + (start,)
    if config.HALF_ROWS:
        inverse = twice(inverse)
    factor = gl.convert_layout(inverse, COLUMN)
    if config.K_KIND == KV_INT4:
        factor = factor * 2.0**24
    elif PARTS == 4:  # of 4-bit floats, which have the factor 2^-14
        factor = factor * 2.0**14
    return WarpQueries(operands, initial, factor)
