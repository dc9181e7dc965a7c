"""Operands of WGMMA from quarters of 8-bit latents: 64 elements at a time, converted in registers.

A quarter of a tile is in shared memory as [LATENTS, 64] words of two neighboring elements. A thread
loads its words of a quarter at once, and converts one half of them while the products with the half
before run: two operands, one for each half, take half of the registers of two quarters. `quantized`
describes the conversion and why neither operand needs data movement.

Elements 2 * w and 2 * w + 1 of a quarter are word w. A thread with number t among the four of a row
has words 16 * t to 16 * t + 15 of a row of keys, of which half h is 16 * t + 8 * h to
16 * t + 8 * h + 7 (`quarter_order`). Half h of a quarter of values is words 32 * h to 32 * h + 31.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.latent_columns import LATENTS
from attnlib.ops.triton.hopper.kernels.quantized import (
    alternate_ptx,
    float16_pairs,
    key_layout,
    split_pairs,
    value_layout,
)

__all__ = [
    "HALVES",
    "convert_keys",
    "convert_values",
    "load_key_halves",
    "load_value_halves",
    "quarter_order",
]

HALVES: gl.constexpr = gl.constexpr(2)
"""Halves of a quarter."""
_WORDS: gl.constexpr = gl.constexpr(64)
"""Words of a quarter."""


@gluon.jit
def quarter_order(layout: gl.constexpr):
    """Return the elements of a quarter in the order of the operands of keys, one after the other.

    Those of the elements after the values follow from `quantized.query_columns`.
    """
    columns = gl.arange(0, 2 * _WORDS, layout)
    half = columns // _WORDS
    word = columns % _WORDS // 2
    return 2 * (word % 4 * 16 + half * 8 + word // 4) + columns % 2


@gluon.jit
def load_key_halves(tile):
    """Load a quarter of keys; returns the words of its halves, [LATENTS, 32] each."""
    words = tile.load(key_layout(LATENTS, _WORDS))
    parts = gl.permute(gl.reshape(words, [LATENTS, 4, HALVES, 8]), (0, 1, 3, 2))
    first, second = gl.split(parts)
    first = gl.reshape(first, [LATENTS, _WORDS // HALVES])
    return first, gl.reshape(second, [LATENTS, _WORDS // HALVES])


@gluon.jit
def convert_keys(words, KV_KIND: gl.constexpr, OPERAND: gl.constexpr):
    """Convert words [LATENTS, 32] of keys to a float16 operand [LATENTS, 64]."""
    WORDS: gl.constexpr = words.shape[1]
    pairs = float16_pairs(words, KV_KIND)
    parts = gl.permute(gl.reshape(pairs, [LATENTS, 4, WORDS // 4]), (0, 2, 1))
    return gl.convert_layout(split_pairs(gl.reshape(parts, [LATENTS, WORDS])), OPERAND)


@gluon.jit
def load_value_halves(tile):
    """Load a quarter of values; returns the words of its halves, [32, LATENTS] each."""
    words = tile.permute((1, 0)).load(value_layout(_WORDS, LATENTS))
    parts = gl.permute(gl.reshape(words, [HALVES, _WORDS // HALVES, LATENTS]), (1, 2, 0))
    return gl.split(parts)


@gluon.jit
def convert_values(words, KV_KIND: gl.constexpr, OPERAND: gl.constexpr):
    """Convert words [32, LATENTS] of values to a float16 operand [64, LATENTS], whose rows are in
    the order of `quantized.value_rows`."""
    WORDS: gl.constexpr = words.shape[0]
    # A register has the bytes (d, d + 1) of one latent and of the next one.
    ASM: gl.constexpr = alternate_ptx(KV_KIND)
    even, odd = gl.inline_asm_elementwise(
        ASM, "=r,=r,r", [words], (gl.float16, gl.float16), True, 2
    )
    both = gl.reshape(gl.join(even, odd), [WORDS // 8, 8, LATENTS, 2])
    rows = gl.reshape(gl.permute(both, (0, 3, 1, 2)), [2 * WORDS, LATENTS])
    return gl.convert_layout(rows, OPERAND)
