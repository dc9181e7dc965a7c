"""How a cache rotates heads before it stores them (P15)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from attnlib.errors import ContractError

__all__ = ["KV_ROTATIONS", "KVRotation", "rotation_block", "rotation_signs"]

_T = TypeVar("_T")
KV_ROTATIONS = ("hadamard", "hadamard_keys", "hadamard_values")
"""The names that `AttentionSpec.kv_rotation` takes."""


@dataclass(frozen=True, kw_only=True)
class KVRotation:
    """A Hadamard rotation of the heads that a cache stores.

    Attributes:
        keys: keys are rotated, and queries with them.
        values: values are rotated, and outputs back.
        seed: of the signs.

    Raises:
        ContractError: neither keys nor values, or a seed that is not an integer of at least 0.
    """

    keys: bool = True
    values: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.keys or self.values):
            raise ContractError("a KVRotation rotates keys, values or both: give None for neither")
        if type(self.seed) is not int or self.seed < 0:
            raise ContractError(f"seed={self.seed!r} must be an integer of at least 0", rule="P15")

    @classmethod
    def of(cls, value: KVRotation | str | None) -> KVRotation | None:
        """A rotation from itself or from its text: a name of `KV_ROTATIONS`, and `@SEED` for a seed
        besides 0.

        Raises:
            ContractError: no rotation has this text.
        """
        if value is None or isinstance(value, cls):
            return value
        name, _, seed = str(value).partition("@")
        if not isinstance(value, str) or name not in KV_ROTATIONS or not (seed or "0").isdecimal():
            raise ContractError(
                f"kv_rotation={value!r} is not known: use one of {', '.join(KV_ROTATIONS)}, with "
                "@SEED for another seed than 0",
                rule="P15",
            )
        side = name.removeprefix("hadamard").removeprefix("_")
        return cls(keys=side != "values", values=side != "keys", seed=int(seed or 0))

    def turn(self, rotate: Callable[[_T, int], _T], key: _T, value: _T) -> tuple[_T, _T]:
        """Keys and values as the cache stores them.

        Args:
            rotate: rotates heads, with the signs of a seed.
            key, value: `[T, Hkv, D]` and `[T, Hkv, Dv]`.
        """
        if self.keys:
            key = rotate(key, self.seed)
        return key, rotate(value, self.seed) if self.values else value

    def sign_bits(self, head_size: int, head_size_v: int) -> tuple[int, int]:
        """The signs of keys and of values, each as one number: bit i is 1 where element i changes
        its sign, and bit `head_size` is 1. 0 for a side that is not rotated."""
        signs = (rotation_signs(size, self.seed) for size in (head_size, head_size_v))
        keys, values = (sum((x < 0) << i for i, x in enumerate((*side, -1.0))) for side in signs)
        return keys * self.keys, values * self.values

    def __str__(self) -> str:
        side = "" if self.keys and self.values else "_keys" if self.keys else "_values"
        return f"hadamard{side}{f'@{self.seed}' if self.seed else ''}"


def rotation_block(head_size: int) -> int:
    """Elements that are rotated together: the largest power of two that divides the head size."""
    return head_size & -head_size


@functools.lru_cache(maxsize=64)
def rotation_signs(head_size: int, seed: int) -> tuple[float, ...]:
    """The sign of each element of a head: 1 or -1. Bit i of SHAKE-256 of "hadamard SIZE SEED"
    decides about element i, so that the bytes of a cache are the same in every process."""
    digest = hashlib.shake_256(f"hadamard {head_size} {seed}".encode()).digest(-(-head_size // 8))
    return tuple(-1.0 if digest[i // 8] >> (i % 8) & 1 else 1.0 for i in range(head_size))
