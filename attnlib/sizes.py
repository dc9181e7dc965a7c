"""Sets of sizes that a backend supports, such as head sizes, and limits of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnlib.errors import ContractError

__all__ = ["MAX_KV_SCALE", "MAX_LOGITS_SOFT_CAP", "MIN_KV_SCALE", "Sizes"]

MIN_KV_SCALE = 2.0**-100
"""Smallest scale of stored keys and values (M9). Kernels multiply it by the softmax scale in
float32; a product that is flushed to zero would turn hidden scores (-inf) into NaN."""

MAX_KV_SCALE = 2.0**100
"""Largest scale of stored keys and values."""

MAX_LOGITS_SOFT_CAP = 8192.0
"""Largest soft cap c (M3). Kernels compute `c * tanh(s / c)` in float32 from `exp`, with an error
of about c * 2^-23 for scores near 0: 0.001 at this limit."""


@dataclass(frozen=True)
class Sizes:
    """A set of sizes.

    Attributes:
        minimum: smallest size.
        maximum: largest size; None for no limit.
        multiple_of: every size is a multiple of it.
        exactly: if not empty, the sizes themselves; the other fields are ignored.

    Raises:
        ContractError: a field is not a positive integer, or `exactly` is not a tuple of these.
    """

    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1
    exactly: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        limits = (self.minimum, self.multiple_of, 1 if self.maximum is None else self.maximum)
        if not isinstance(self.exactly, tuple) or not all(map(_is_size, (*limits, *self.exactly))):
            raise ContractError(
                f"{self!r} is not a set of sizes: give positive integers, and a tuple of these for "
                "exactly, such as Sizes(exactly=(64,))"
            )

    def __contains__(self, size: int) -> bool:
        if self.exactly:
            return size in self.exactly
        return (
            size >= self.minimum
            and (self.maximum is None or size <= self.maximum)
            and size % self.multiple_of == 0
        )

    def __str__(self) -> str:
        if self.exactly:
            return ", ".join(str(size) for size in self.exactly)
        step = f"multiples of {self.multiple_of} " if self.multiple_of > 1 else ""
        return f"{step}from {self.minimum}" + (
            f" to {self.maximum}" if self.maximum is not None else " up"
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 0
