"""Device functions of open formats (P16) as instructions for two words at a time.

A function of the 4 or 8 bits of an element is a table. Equal steps are one multiplication and
addition in float16, as in the library's formats (`page_formats.unpack_ptx`), and 16 numbers of
another kind are in registers. Kernels call other functions for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnlib.kv_formats.number_table import number_table

__all__ = ["number_ptx"]

_HEAD = "{.reg .b32 t, s, h, a, b, c, d, x, y, l, m; "


def number_ptx(function: Callable[..., Any], bits: int) -> str | None:
    """PTX code that converts two words, the last operand, to pairs of float16, the others, as that
    of `unpack_ptx`; None where the function is no such table.

    Args:
        function: `KVFormat.number`.
        bits: of an element, 4 or 8.
    """
    table = number_table(function, bits)
    if table is None:
        return None
    for flip in (0, 1 << (bits - 1)):
        line = _line([table[code ^ flip] for code in range(1 << bits)])
        if line is not None:
            return _HEAD + (_line4 if bits == 4 else _line8)(flip, *line) + "}"
    return _HEAD + _lookup4(table) + "}" if bits == 4 else None


def _line(table: Sequence[float]) -> tuple[float, float] | None:
    """(a, b) if `a * code + b` gives the numbers and float16 holds what the instructions take."""
    step, first = table[1] - table[0], table[0]
    if any(step * code + first != number for code, number in enumerate(table)):
        return None
    exact = all(_is_half(number) for number in (step, step / 16, first - 1024 * step))
    return (step, first) if exact and _is_half(first - 64 * step) else None


def _half(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64, device="cpu").half()


def _is_half(number: float) -> bool:
    return float(_half(number)) == number


def _line8(flip: int, step: float, first: float) -> str:
    """`step * code + first` of bytes: `prmt` makes a byte of each word the last bits of 1024."""
    code = f"xor.b32 s, $2, {flip * 0x01010101:#010x}; mov.b32 b, 0x64646464; "
    code += f"mov.b32 c, {_pair(step)}; mov.b32 d, {_pair(first - 1024 * step)}; "
    for part, selector in enumerate(("0x5240", "0x5341")):
        code += f"prmt.b32 t, s, b, {selector}; fma.rn.f16x2 ${part}, t, c, d; "
    return code


def _line4(flip: int, step: float, first: float) -> str:
    """The same of 4 bits: they become the last bits of 1024 + n or those of 1024 + 16 n."""
    code = "shr.u32 h, $4, 8; "
    for part, shift in enumerate((0, 4, 0, 4)):
        mask, bits = 0x000F000F << shift, 0x64006400 | flip * 0x00010001 << shift
        factor, offset = step / (1 << shift), first - step * (1024 >> shift)
        # lop3 0x6A is (word & mask) ^ bits.
        code += (
            f"lop3.b32 t, {'$4' if part < 2 else 'h'}, {mask:#010x}, {bits:#010x}, 0x6A; "
            f"mov.b32 c, {_pair(factor)}; mov.b32 d, {_pair(offset)}; "
            f"fma.rn.f16x2 ${part}, t, c, d; "
        )
    return code


def _lookup4(table: Sequence[float]) -> str:
    """A number of 16: `prmt` finds the bytes of four numbers of eight by 3 bits of their codes, and
    chooses between two such results by the last bits."""
    bits = [int(_half(number).view(torch.int16)) for number in table]
    code = (
        "and.b32 s, $4, 0x77777777; shr.u32 h, $4, 1; lop3.b32 h, h, 0x44444444, 0x32103210, 0xEA; "
    )
    for word in (("a", "b"), ("c", "d")):
        for byte, target in ((0, "l"), (8, "m")):
            parts = [
                sum((bits[first + number] >> byte & 0xFF) << 8 * number for number in range(4))
                for first in range(0, 16, 4)
            ]
            for half, register in enumerate("xy"):
                low, high = parts[2 * half : 2 * half + 2]
                code += f"prmt.b32 {register}, {low:#010x}, {high:#010x}, s; "
            code += f"prmt.b32 {target}, x, y, h; "
        for register, selector in zip(word, ("0x5140", "0x7362"), strict=True):
            code += f"prmt.b32 {register}, l, m, {selector}; "
        code += "shr.u32 s, s, 16; shr.u32 h, h, 16; " if word[0] == "a" else ""
    for part, (first, second) in enumerate((("a", "c"), ("a", "c"), ("b", "d"), ("b", "d"))):
        code += f"prmt.b32 ${part}, {first}, {second}, {('0x5410', '0x7632')[part % 2]}; "
    return code


def _pair(number: float) -> str:
    """Two equal float16 in 32 bits."""
    bits = int(_half(number).view(torch.int16)) & 0xFFFF
    return f"{bits << 16 | bits:#010x}"
