"""Device functions of open formats (P16) as instructions for two words at a time.

A function of the 4 or 8 bits of an element is a table. Equal steps are one multiplication and
addition in float16, as in the library's formats (`page_formats.unpack_ptx`). 256 numbers whose sign
is a bit of its own are computed if 128 of them are a polynomial of second degree or floats of 7
bits. Kernels look others up in shared memory (`kernels.number_tables`), and call functions of more
bits for each element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnlib.kv_formats.number_table import Number, number_table

__all__ = ["is_looked_up", "number_ptx"]

_FIRST = 2.0**15
"""First factor of floats whose largest number is out of reach of one."""
_HEAD = "{.reg .b32 t, s, h, a, b, c, d, x, y, l, m; "


def is_looked_up(number: Number | None, bits: int) -> bool:
    """Whether a kernel whose numbers may be packed finds them in a table in shared memory."""
    if number is None or number_table(number, bits) is None:
        return False
    return number_ptx(number, bits) is None


def number_ptx(number: Number, bits: int) -> str | None:
    """PTX code that converts two words, the last operand, to pairs of float16, the others, as that
    of `unpack_ptx`; None where the function is not such a table.

    Args:
        number: `KVFormat.number`.
        bits: of an element, 4 or 8.
    """
    table = number_table(number, bits)
    if table is None:
        return None
    for flip in (0, 1 << (bits - 1)):
        line = _line([table[code ^ flip] for code in range(1 << bits)])
        if line is not None:
            return _HEAD + (_line4 if bits == 4 else _line8)(flip, *line) + "}"
    if bits == 4:
        return None
    for mirrored in (False, True):
        others = table[:127:-1] if mirrored else table[128:]
        if all(number == -other for number, other in zip(table[:128], others, strict=True)):
            signed = _signed8(table[:128], mirrored)
            return None if signed is None else _HEAD + signed + "}"
    return None


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


def _codes(mirrored: bool) -> str:
    """Codes without their first bits, in s; those that have it inverted if `mirrored`."""
    if not mirrored:
        return "and.b32 s, $2, 0x7F7F7F7F; "
    # t has ones behind the first bit of such codes. lop3 0x28 is ($2 ^ t) & mask.
    code = "shr.u32 t, $2, 7; and.b32 t, t, 0x01010101; mul.lo.u32 t, t, 127; "
    return code + "lop3.b32 s, $2, t, 0x7F7F7F7F, 0x28; "


def _signed8(numbers: Sequence[float], mirrored: bool) -> str | None:
    """128 numbers, and their negatives, whose codes have the first bit: n + 128 for that of code n,
    or 255 - n if `mirrored`; None unless a few instructions compute the numbers."""
    found = _quadratic(numbers) or _float7(numbers)
    if found is None:
        return None
    code = "shl.b32 x, $2, 8; " + _codes(mirrored)
    for part, compute in enumerate(found):
        code += f"{compute}lop3.b32 ${part}, {'$2' if part else 'x'}, 0x80008000, h, 0x6A; "
    return code


def _quadratic(numbers: Sequence[float]) -> list[str] | None:
    """Instructions for h, `(a n + b) n + c` of the codes n of each part in s."""
    c, second, third = numbers[:3]
    a = (third - 2 * second + c) / 2
    b = second - c - a
    n = torch.arange(len(numbers), dtype=torch.float64, device="cpu")
    inner = (n * a + b).half().double()
    found = (inner * n + c).half().tolist()
    if found != list(numbers) or not all(map(_is_half, (a, b, c))):
        return None
    steps = "mul.rn.f16x2 h, h, h; "
    if (a, b, c) != (1.0, 0.0, 0.0):
        steps = f"mov.b32 c, {_pair(a)}; mov.b32 d, {_pair(b)}; fma.rn.f16x2 y, h, c, d; "
        steps += f"mov.b32 c, {_pair(c)}; fma.rn.f16x2 h, y, h, c; "
    # `prmt` makes a code the last bits of 1024.
    first = "mov.b32 b, 0x64646464; mov.b32 c, 0xE400E400; "
    return [
        f"{first}prmt.b32 h, s, b, {selector}; add.rn.f16x2 h, h, c; {steps}"
        for selector in ("0x5240", "0x5341")
    ]


def _float7(numbers: Sequence[float]) -> list[str] | None:
    """The same for floats without a sign, with 2 to 5 bits of exponent, times a number."""
    codes = torch.arange(len(numbers), dtype=torch.int16, device="cpu")
    for shift in range(4):
        bits = (codes << (8 - shift)).view(torch.float16).double()
        factor = float(numbers[64] / bits[64])
        if (bits * factor).half().tolist() != list(numbers):
            continue
        factors = [factor] if _is_half(factor) else [_FIRST, factor / _FIRST]
        if not all(map(_is_half, factors)):
            continue
        steps = "".join(f"mov.b32 c, {_pair(one)}; mul.rn.f16x2 h, h, c; " for one in factors)
        return [
            f"prmt.b32 h, s, 0, {selector}; shr.u32 h, h, {shift}; {steps}"
            for selector in ("0x2404", "0x3414")
        ]
    return None


def _pair(number: float) -> str:
    """Two equal float16 in 32 bits."""
    bits = int(_half(number).view(torch.int16)) & 0xFFFF
    return f"{bits << 16 | bits:#010x}"
