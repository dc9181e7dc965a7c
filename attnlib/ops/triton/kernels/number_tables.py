"""Numbers of open formats (P16) in shared memory, for functions of an element without instructions.

An entry of a table is found by a byte of a page: two float16 numbers, those of its elements of 4
bits, or twice that of its element of 8 bits. Every lane of a warp reads a copy of its own, in its
own bank of shared memory, so that a warp reads 32 entries at a time; where keys and values have
other numbers, two lanes share a copy of each table.

Triton gives kernels no shared memory to address. PTX code declares it: a variable of the function,
beside the memory that Triton counts.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = [
    "NUMBER_TABLE_BYTES",
    "code_of_keys",
    "code_of_values",
    "has_tables",
    "lookup_ptx",
    "open_tables",
]

NUMBER_TABLE_BYTES = 32 * 1024
"""Shared memory of the tables of a kernel, one or two."""

_KEYS: tl.constexpr = tl.constexpr("attnlib_keys")
_VALUES: tl.constexpr = tl.constexpr("attnlib_values")


@triton.constexpr_function
def _looks_up(number, ptx):
    """Return whether a kernel finds the numbers of this function in a table (`quantized_pages`)."""
    return ptx > 0 and getattr(number, "is_looked_up", False)


def has_tables(config: Any) -> bool:
    """Whether a kernel with these constants has tables, in memory that Triton does not count."""
    numbers = (getattr(config, "NUMBER", None), getattr(config, "V_NUMBER", None))
    return any(getattr(one, "is_looked_up", False) for one in numbers) and config.PTX > 0


@triton.constexpr_function
def _bits(number):
    """Return the bits of an element."""
    return number.bits


@triton.constexpr_function
def _own_table(values, keys, ptx):
    """Return whether values have a table, which is not that of the keys."""
    return _looks_up(values, ptx) and values is not keys


@triton.constexpr_function
def _copies(keys, values, ptx):
    """Return the copies of each table."""
    return 16 if _looks_up(keys, ptx) and _own_table(values, keys, ptx) else 32


@triton.constexpr_function
def code_of_keys(keys, values, ptx):
    """Return the NUMBER of keys, or PTX code that looks their numbers up."""
    if _looks_up(keys, ptx):
        return lookup_ptx(_KEYS, _copies(keys, values, ptx), keys.bits)
    return keys


@triton.constexpr_function
def code_of_values(keys, values, ptx):
    """Return the NUMBER of values, or PTX code that looks their numbers up."""
    if _looks_up(values, ptx):
        name = _VALUES if _own_table(values, keys, ptx) else _KEYS
        return lookup_ptx(name, _copies(keys, values, ptx), values.bits)
    return values


@triton.constexpr_function
def lookup_ptx(name, copies, bits):
    """PTX code that finds the numbers of two words, like that of `page_formats.unpack_ptx`.

    Args:
        name: of the table.
        copies: of each entry.
        bits: of an element, 4 or 8.
    """
    word = "$4" if bits == 4 else "$2"
    code = "{.reg .b32 a, b, c, d, t, l; mov.u32 l, %laneid; "
    code += f"and.b32 l, l, {copies - 1}; mov.b32 t, {name}; mad.lo.u32 t, l, 4, t; "
    code += f"and.b32 a, {word}, 255; prmt.b32 b, {word}, 0, 0x4441; "
    code += f"prmt.b32 c, {word}, 0, 0x4442; shr.u32 d, {word}, 24; "
    for byte in "abcd":
        code += f"mad.lo.u32 {byte}, {byte}, {4 * copies}, t; "
    for byte in "abcd":
        code += f"ld.shared.b32 {byte}, [{byte}]; "
    if bits == 4:  # a and b are of the first word, c and d of the second one
        code += "prmt.b32 $0, a, c, 0x5410; prmt.b32 $1, a, c, 0x7632; "
        return code + "prmt.b32 $2, b, d, 0x5410; prmt.b32 $3, b, d, 0x7632; }"
    return code + "prmt.b32 $0, a, c, 0x5410; prmt.b32 $1, b, d, 0x5410; }"


@triton.constexpr_function
def _declaration(name, copies):
    return f".shared .align 16 .b8 {name}[{1024 * copies}]; mov.b32 $0, $1;"


@triton.constexpr_function
def _filling(name, copies):
    """Return PTX code that stores the copies of an entry, $2, of number $1."""
    code = f"{{.reg .b32 a, t; mov.b32 t, {name}; mad.lo.u32 a, $1, {4 * copies}, t; "
    for first in range(0, copies, 4):
        code += f"st.shared.v4.b32 [a+{4 * first}], {{$2, $2, $2, $2}}; "
    return code + "mov.b32 $0, a; }"


@triton.jit
def _fill(any_number, NUMBER: tl.constexpr, NAME: tl.constexpr, COPIES: tl.constexpr):
    """Declare a table and store it. The caller synchronizes."""
    DECLARE: tl.constexpr = _declaration(NAME, COPIES)
    FILL: tl.constexpr = _filling(NAME, COPIES)
    # One operand, so that the code is there once.
    tl.inline_asm_elementwise(DECLARE, "=r,r", [any_number], tl.int32, is_pure=False, pack=1)
    codes = tl.arange(0, 256)
    low = NUMBER(codes, 0).to(tl.float16)
    high = low
    if _bits(NUMBER) == 4:
        high = NUMBER(codes, 1).to(tl.float16)
    entries = low.to(tl.uint16, bitcast=True).to(tl.int32)
    entries |= high.to(tl.uint16, bitcast=True).to(tl.int32) << 16
    tl.inline_asm_elementwise(FILL, "=r,r,r", [codes, entries], tl.int32, is_pure=False, pack=1)


@triton.jit
def open_tables(any_number, CONFIG: tl.constexpr):
    """Store the tables of keys and values, where they have some. `any_number` is an int32."""
    KEYS: tl.constexpr = CONFIG.NUMBER
    VALUES: tl.constexpr = CONFIG.V_NUMBER
    COPIES: tl.constexpr = _copies(KEYS, VALUES, CONFIG.PTX)
    HAS_KEYS: tl.constexpr = _looks_up(KEYS, CONFIG.PTX)
    HAS_VALUES: tl.constexpr = _own_table(VALUES, KEYS, CONFIG.PTX)
    if HAS_KEYS:
        _fill(any_number, KEYS, _KEYS, COPIES)
    if HAS_VALUES:
        _fill(any_number, VALUES, _VALUES, COPIES)
    if HAS_KEYS or HAS_VALUES:
        tl.debug_barrier()
