"""Device functions of open formats as instructions for two words (P16)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from attnlib.kv_formats.number_table import Number, number_table, numbers_of
from attnlib.object_path import load_object
from attnlib.ops.triton.kernels.page_formats import PAGE_OPEN8, unpack
from attnlib.ops.triton.launch.number_code import is_looked_up, number_ptx
from attnlib.ops.triton.launch.score_compile import compile_score
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
LOOKUPS = {ROTATED_4BIT.number: 4, thirds4: 4, e2m1: 4, sorted4: 4, nf4: 4}
COMPUTED = {SQUARES.number: 8, mirrored_squares8: 8, e3m4: 8, e2m5: 8}
TABLES: dict[Any, int] = EQUAL_STEPS | LOOKUPS | COMPUTED
LOOKED_UP = {thirds8: 8, cubes8: 8}
CALLED = {scaled_by_neighbor: 8, of_its_part: 4, infinite: 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", TABLES, ids=_name)
def test_instructions_give_the_numbers(function: Number, dtype: torch.dtype) -> None:
    """Every code in each place of a register, whatever the default dtype of torch is."""
    bits = TABLES[function]
    number_table.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        code = number_ptx(function, bits)
        assert code is not None and torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert ("fma.rn.f16x2 $" in code) == (function in EQUAL_STEPS)
    for first in range(256):
        register = (first | (first * 91 + 7 & 255) << 8) * 0x10001 ^ (first * 37 + 13 & 255) << 16
        words = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32)
        parts = range(16 // bits)
        wanted = [numbers_of(function, words, part).half().double() for part in parts]
        found = [floats(pair) for pair in emulate(code, register)]
        assert torch.equal(torch.stack(found), torch.stack(wanted)), hex(register)


@pytest.mark.parametrize("function", CALLED, ids=_name)
def test_what_kernels_call_for_each_element(function: Callable[..., Any]) -> None:
    assert number_ptx(function, CALLED[function]) is None
    assert not is_looked_up(function, CALLED[function])


@triton.jit
def _unpack_kernel(words, out, NUMBER: tl.constexpr):
    offsets = tl.arange(0, 128)[:, None] * 2 + tl.arange(0, 2)[None, :]
    x0, x1, _, _ = unpack(tl.load(words + offsets), PAGE_OPEN8, tl.float16, 90, NUMBER)
    tl.store(out + offsets, x0)
    tl.store(out + 256 + offsets, x1)


@pytest.mark.parametrize("function", LOOKED_UP, ids=_name)
def test_what_kernels_look_up(function: Callable[..., Any], device: torch.device) -> None:
    """Each code in both bytes of a word."""
    assert number_ptx(function, 8) is None and is_looked_up(function, 8)
    assert not any(is_looked_up(number, bits) for number, bits in TABLES.items())
    codes = torch.arange(256, dtype=torch.int32)
    words = (codes | (codes * 91 + 7 & 255) << 8).short().to(device)
    out = torch.empty(2, 256, dtype=torch.float16, device=device)
    apply = compile_score(function, "triton").apply
    apply.is_table = True
    _unpack_kernel[(1,)](words, out, NUMBER=apply)
    wanted = [numbers_of(function, words.int(), part).half() for part in range(2)]
    assert torch.equal(out, torch.stack(wanted))
