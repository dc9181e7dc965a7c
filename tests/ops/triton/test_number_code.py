"""Device functions of open formats as instructions for two words (P16)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attnlib.kv_formats.number_table import Number, number_table, numbers_of
from attnlib.object_path import load_object
from attnlib.ops.triton.kernels.number_tables import lookup_ptx
from attnlib.ops.triton.launch.number_code import is_looked_up, number_ptx
from attnlib.score_functions import exp2, where
from tests.kv_formats.conftest import MODULE
from tests.kv_formats.device_formats import SQUARES
from tests.ops.triton.emulated_ptx import emulate, floats


def signed8(word: Any, part: int) -> Any:
    code = (word >> (8 * part)) & 255
    return code * 1.0 - where(code > 127, 256.0, 0.0)


def centered8(word: Any, part: int) -> Any:
    return ((word >> (8 * part)) & 255) * 0.25 - 31.75


def signed4(word: Any, part: int) -> Any:
    code = (word >> (4 * part)) & 15
    return code * 1.0 - where(code > 7, 16.0, 0.0)


def centered4(word: Any, part: int) -> Any:
    return ((word >> (4 * part)) & 15) * -1.0 + 7.0


def thirds4(word: Any, part: int) -> Any:
    """Equal steps that float16 rounds."""
    return ((word >> (4 * part)) & 15) / 3.0 - 2.5


def e2m1(word: Any, part: int) -> Any:
    code = (word >> (4 * part)) & 15
    size = code & 7
    large = exp2(((size >> 1) - 1) * 1.0) * (1.0 + (size & 1) * 0.5)
    number = where(size > 1, large, size * 0.5)
    return where(code > 7, -number, number)


def sorted4(word: Any, part: int) -> Any:
    """Ascending numbers, as those of `levels` of the example, with the negative ones at 8 to 15."""
    code = (word >> (4 * part)) & 15
    size = where(code > 7, 15 - code, code) * 1.0
    size = size * size * 0.03 + size * 0.25 + 0.13
    return where(code > 7, -size, size)


def nf4(word: Any, part: int) -> Any:
    """Numbers without symmetry."""
    code = ((word >> (4 * part)) & 15) * 1.0
    return code * code * 0.01 - 1.0


def mirrored_squares8(word: Any, part: int) -> Any:
    code = (word >> (8 * part)) & 255
    size = where(code > 127, 255 - code, code) * 1.0
    return where(code > 127, -1.0, 1.0) * (size * size * 0.25 + size * 0.5 + 0.25)


def e3m4(word: Any, part: int) -> Any:
    code = (word >> (8 * part)) & 127
    size = exp2((code >> 4) - 1.0) * (16.0 + (code & 15))
    size = where(code > 15, size, (code & 15) * 1.0)
    return where(((word >> (8 * part)) & 128) > 0, -size, size)


def e2m5(word: Any, part: int) -> Any:
    """Mirrored: 255 is -0."""
    code = (word >> (8 * part)) & 255
    low = where(code > 127, 255 - code, code)
    size = where(low > 31, exp2((low >> 5) - 1.0) * (32.0 + (low & 31)), low * 1.0) * 0.125
    return where(code > 127, -size, size)


def cubes8(word: Any, part: int) -> Any:
    code = (word >> (8 * part)) & 255
    root = (code & 127) * 0.125
    return where(code > 127, -root * root * root, root * root * root)


def thirds8(word: Any, part: int) -> Any:
    return ((word >> (8 * part)) & 255) / 3.0


def scaled_by_neighbor(word: Any, part: int) -> Any:
    return ((word >> (8 * part)) & 255) * ((word >> (8 - 8 * part)) & 1)


def of_its_part(word: Any, part: int) -> Any:
    return ((word >> (4 * part)) & 15) * (part + 1.0)


def infinite(word: Any, part: int) -> Any:
    return ((word >> (4 * part)) & 15) * 1e5


def _name(number: Number) -> str:
    return "table" if isinstance(number, tuple) else number.__name__


ROTATED_4BIT = load_object(f"{MODULE}:ROTATED_4BIT")
EQUAL_STEPS = {signed8: 8, centered8: 8, signed4: 4, centered4: 4}
COMPUTED = {SQUARES.number: 8, mirrored_squares8: 8, e3m4: 8, e2m5: 8}
CODE: dict[Any, int] = EQUAL_STEPS | COMPUTED
LOOKED_UP = {ROTATED_4BIT.number: 4, thirds4: 4, e2m1: 4, sorted4: 4, nf4: 4, thirds8: 8, cubes8: 8}
CALLED = {scaled_by_neighbor: 8, of_its_part: 4, infinite: 4}


def _registers() -> Iterator[int]:
    """Two words, with every byte in each place."""
    for first in range(256):
        yield (first | (first * 91 + 7 & 255) << 8) * 0x10001 ^ (first * 37 + 13 & 255) << 16


def _wanted(function: Number, bits: int, register: int) -> torch.Tensor:
    words = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32)
    parts = range(16 // bits)
    return torch.stack([numbers_of(function, words, part).half().double() for part in parts])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", CODE, ids=_name)
def test_instructions_give_the_numbers(function: Number, dtype: torch.dtype) -> None:
    """Every code in each place of a register, whatever the default dtype of torch is."""
    bits = CODE[function]
    number_table.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        code = number_ptx(function, bits)
        assert code is not None and torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert not is_looked_up(function, bits)
    assert ("fma.rn.f16x2 $" in code) == (function in EQUAL_STEPS)
    for register in _registers():
        found = [floats(pair) for pair in emulate(code, register)]
        assert torch.equal(torch.stack(found), _wanted(function, bits, register)), hex(register)


@pytest.mark.parametrize("copies", [16, 32])
@pytest.mark.parametrize("function", LOOKED_UP, ids=_name)
def test_what_kernels_look_up(function: Number, copies: int) -> None:
    """Lanes read their own copies; 32 of them, and 16 of two tables, are in banks of their own."""
    bits, start, banks = LOOKED_UP[function], 1040, set()
    assert number_ptx(function, bits) is None and is_looked_up(function, bits)
    bytes_ = torch.arange(256, dtype=torch.int32)
    parts = [numbers_of(function, bytes_, part).half() for part in (0, int(bits == 4))]
    low, high = (part.view(torch.int16).int() & 0xFFFF for part in parts)
    entries = (low.long() | high.long() << 16).tolist()
    code = lookup_ptx.fn("numbers", copies, bits)
    for lane, register in zip(itertools.cycle(range(32)), _registers(), strict=False):
        addresses: list[int] = []

        def memory(address: int, addresses: list[int] = addresses) -> int:
            addresses.append(address)
            return int(entries[(address - start) // (4 * copies)])

        pairs = emulate(code, register, {"%laneid": lane, "numbers": start}, memory)
        found = torch.stack([floats(pair) for pair in pairs])
        assert torch.equal(found, _wanted(function, bits, register)), hex(register)
        assert len(addresses) == 4 and len({address % (4 * copies) for address in addresses}) == 1
        banks.add(addresses[0] // 4 % copies)
    assert len(banks) == copies


@pytest.mark.parametrize("function", CALLED, ids=_name)
def test_what_kernels_call_for_each_element(function: Callable[..., Any]) -> None:
    assert number_ptx(function, CALLED[function]) is None
    assert not is_looked_up(function, CALLED[function])
