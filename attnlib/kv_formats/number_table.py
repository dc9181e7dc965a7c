"""The numbers of an open format with a device function (P16)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from attnlib.score_functions.float32_numbers import float32_numbers

__all__ = ["Number", "number_table", "numbers_of"]

Number = Callable[[Any, int], Any] | tuple[float, ...]
"""`KVFormat.number`: a device function, or the 16 numbers of a format of 4 bits."""


def numbers_of(number: Number, words: torch.Tensor, part: int) -> torch.Tensor:
    """The numbers of a part of 16-bit words, int32; what a kernel computes."""
    if not isinstance(number, tuple):
        return torch.as_tensor(number(words, part), device=words.device)
    codes = (words >> (4 * part)) & 15
    return torch.tensor(number, dtype=torch.float32, device=words.device)[codes.long()]


@functools.lru_cache(maxsize=64)
def number_table(number: Number, bits: int) -> tuple[float, ...] | None:
    """The numbers of all codes, rounded to float16; None if they are not finite, or if those of an
    element depend on more than its bits."""
    words, found = torch.arange(1 << 16, dtype=torch.int32, device="cpu"), None
    for part in range(16 // bits):
        with float32_numbers():
            given = numbers_of(number, words, part).expand(words.shape).half()
        codes = ((words >> (bits * part)) & ((1 << bits) - 1)).long()
        own = given.new_zeros(1 << bits).index_copy_(0, codes, given)
        if found is None:
            found = own
        if not own.isfinite().all() or not torch.equal(own[codes], given) or (own != found).any():
            return None
    assert found is not None  # 16 bits hold elements
    return tuple(float(number) for number in found)
