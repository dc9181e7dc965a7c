"""Sets of sizes, as a backend declares them: heads, blocks, query heads per KV head."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Sizes"]


@dataclass(frozen=True)
class Sizes:
    """A set of sizes: every multiple of `multiple_of` from `minimum` to `maximum`, or just `exactly` these."""

    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1
    exactly: tuple[int, ...] = ()

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
