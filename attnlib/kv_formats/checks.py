"""What a `KVFormat` must declare (P16)."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import torch

from attnlib.errors import ContractError
from attnlib.kv_formats.number_table import Number, numbers_of
from attnlib.score_functions.checks import CheckedKind, check_function
from attnlib.score_functions.float32_numbers import float32_numbers

if TYPE_CHECKING:
    from attnlib.kv_formats.declaration import KVFormat

__all__ = ["check_names", "check_stored"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(:[A-Za-z0-9][\w.-]*)?", re.ASCII)
_DEVICE_FUNCTION = CheckedKind(
    "device function", "P16", "write numbers in the function, or give 16 numbers as number=(...)",
    "write numbers in the function",
)  # fmt: skip
_SCALES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8)


def _refuse(stored: KVFormat, field: str, limit: str) -> ContractError:
    return ContractError(
        f"KV format {stored.name!r} has {field}={getattr(stored, field)!r}: {limit}", rule="P16"
    )


def check_names(stored: KVFormat) -> None:
    """Check the name, and that numbers are integers.

    Raises:
        ContractError: the message names the field and the limit.
    """
    if not isinstance(stored.name, str) or not _NAME.fullmatch(stored.name):
        raise _refuse(stored, "name", "write package:name, of letters, digits, '_', '-' and '.'")
    for field in ("version", "bits", "head_size_multiple"):
        value = getattr(stored, field)
        if type(value) is not int or value < 1:
            raise _refuse(stored, field, "it must be an integer of at least 1")
    for field in ("groups_per_head", "elements_per_group"):
        value = getattr(stored, field)
        if type(value) is not int or value < 0:
            raise _refuse(stored, field, "it must be an integer of at least 0")


def check_stored(stored: KVFormat) -> None:
    """Check the fields of a format with scales in the page.

    Raises:
        ContractError: no format can have a value; the message names the field and the limit.
    """
    _check_storage(stored)
    _check_conversions(stored)


def _check_storage(stored: KVFormat) -> None:
    """Sizes of a format with scales in the page."""
    if not isinstance(stored.dtype, torch.dtype) or stored.dtype.itemsize != 1:
        raise _refuse(stored, "dtype", "elements must have one byte, such as torch.uint8")
    if stored.scale_dtype not in _SCALES:
        names = ", ".join(str(dtype) for dtype in _SCALES)
        raise _refuse(stored, "scale_dtype", f"every format has scales, of one of {names}")
    group, multiple = stored.elements_per_group, stored.head_size_multiple
    if (stored.groups_per_head == 0) == (group == 0):
        raise _refuse(
            stored, "groups_per_head", "give one of groups_per_head and elements_per_group"
        )
    if multiple * stored.bits % 8:
        raise _refuse(
            stored,
            "head_size_multiple",
            f"heads of {multiple} elements of {stored.bits} bits are not whole bytes; use a "
            f"multiple of {8 // math.gcd(8, stored.bits)}",
        )
    if group and multiple % group:
        raise _refuse(stored, "head_size_multiple", f"use a multiple of elements_per_group={group}")


def _check_conversions(stored: KVFormat) -> None:
    """The functions of a format with scales in the page, and what it states about them."""
    for field in ("encode", "decode"):
        if not callable(getattr(stored, field)):
            raise _refuse(stored, field, "give a function, module-level so that workers find it")
    if not (isinstance(stored.error, int | float) and 0 < stored.error < 1):
        raise _refuse(stored, "error", "state a bound of the relative error, above 0 and below 1")
    span = stored.span
    numbers = isinstance(span, tuple) and len(span) == 2
    numbers = numbers and all(isinstance(end, int | float) for end in span)
    if not numbers or not 0 < span[0] <= span[1] < math.inf:
        raise _refuse(stored, "span", "it must be a pair (smallest, largest) of numbers above 0")
    if not _is_finite(stored.largest) or stored.largest < 0:
        raise _refuse(stored, "largest", "it must be a number of at least 0; 0 if there is none")
    if not isinstance(stored.rotated, bool):
        raise _refuse(stored, "rotated", "it must be True or False")
    if stored.number is None:
        return
    assert stored.scale_dtype is not None  # of formats with scales in the page
    advice = (
        "leave out number, with which kernels read heads of 4 or 8 bits and one "
        "floating-point scale"
    )
    if stored.bits not in (4, 8):
        raise _refuse(stored, "bits", advice)
    if stored.groups_per_head != 1:
        groups = "elements_per_group" if stored.elements_per_group else "groups_per_head"
        raise _refuse(stored, groups, advice)
    if not stored.scale_dtype.is_floating_point:
        raise _refuse(stored, "scale_dtype", advice)
    if callable(stored.number):
        check_function(stored.number, ("word", "part"), _DEVICE_FUNCTION)
        _check_words(stored, stored.number)
        return
    is_table = isinstance(stored.number, tuple) and len(stored.number) == 16
    if stored.bits != 4 or not is_table or not all(map(_is_finite, stored.number)):
        raise ContractError(
            f"number of KV format {stored.name!r} is neither a function nor a tuple of 16 finite "
            "numbers for 4 bits: give one of them",
            rule="P16",
        )


def _check_words(stored: KVFormat, number: Number) -> None:
    """Call the device function: kernels compute many words at a time."""
    words = torch.arange(3, dtype=torch.int32, device="cpu")
    try:
        with float32_numbers():
            for part in range(16 // stored.bits):
                numbers_of(number, words, part)
    except Exception as error:  # whatever a package raises
        raise ContractError(
            f"number of KV format {stored.name!r} raises {type(error).__name__} for a tensor of "
            f"words ({error}): write it in the operators of score functions, such as where",
            rule="P16",
        ) from error


def _is_finite(x: object) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)
