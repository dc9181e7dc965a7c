"""Backends that rotate heads for the cache (P15), or store pairs of formats, in a wrong way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlib.backends.base import AttentionBackend
from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.impl import TorchImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.kv_rotation import rotation_block
from attnlib.ops.hadamard import sign_table
from attnlib.ops.torch.hadamard import rotate_heads

__all__ = ["WRONG_ROTATIONS"]


class WithoutTheFactor(TorchImpl):
    """Sums without `1 / sqrt(B)`: scores are B times too large."""

    def rotate_heads(self, heads: Tensor, seed: int = 0, **how: Any) -> Tensor:
        factor = 1.0 if how.get("inverse") else rotation_block(heads.shape[2]) ** 0.5
        return rotate_heads(heads * factor, seed, **how)


class IgnoresTheSeed(TorchImpl):
    """The same signs for every seed."""

    def rotate_heads(self, heads: Tensor, seed: int = 0, **how: Any) -> Tensor:
        return rotate_heads(heads, 0, **how)


class KeepsTheOutputRotated(TorchImpl):
    """Does not rotate back."""

    def rotate_heads(
        self, heads: Tensor, seed: int = 0, *, inverse: bool = False, out: Tensor | None = None
    ) -> Tensor:
        return heads if inverse else rotate_heads(heads, seed, out=out)


class RotatesOnInsteadOfBack(TorchImpl):
    """Takes the rotation for its own inverse, which the signs forbid."""

    def rotate_heads(
        self, heads: Tensor, seed: int = 0, *, inverse: bool = False, out: Tensor | None = None
    ) -> Tensor:
        return rotate_heads(heads, seed, out=out)


class IgnoresTheQueries(TorchImpl):
    """Rotates what is written, and not the queries."""

    def rotate_heads(self, heads: Tensor, seed: int = 0, **how: Any) -> Tensor:
        is_query = not how and heads.shape[1] == self.spec.num_heads
        return heads if is_query else rotate_heads(heads, seed, **how)


class SumsInAnotherOrder(TorchImpl):
    """Neighbors first: other bits, and so other bytes in the cache."""

    def rotate_heads(
        self, heads: Tensor, seed: int = 0, *, inverse: bool = False, out: Tensor | None = None
    ) -> Tensor:
        if inverse:
            return rotate_heads(heads, seed, inverse=True, out=out)
        size, block = heads.shape[2], rotation_block(heads.shape[2])
        x, half = heads.float() * sign_table(seed, heads.device, size), 1
        while half < block:
            first, second = x.reshape(*heads.shape[:2], size // (2 * half), 2, half).unbind(3)
            x, half = torch.stack((first + second, first - second), 3), 2 * half
        return (x.reshape(heads.shape) * block**-0.5).to(heads.dtype)


class InfinitiesCancel(TorchImpl):
    """Adds infinities and numbers that overflow, which gives NaN."""

    def rotate_heads(self, heads: Tensor, seed: int = 0, **how: Any) -> Tensor:
        found = rotate_heads(heads, seed, **how)
        lost = (heads.abs() > 1e38).any(-1, keepdim=True)
        return found if how.get("inverse") else found.masked_fill(lost, torch.nan)


class HidesNan(TorchImpl):
    """A NaN becomes 0 before the sums."""

    def rotate_heads(self, heads: Tensor, seed: int = 0, **how: Any) -> Tensor:
        clean = heads if how.get("inverse") else heads.nan_to_num(0.0)
        return rotate_heads(clean, seed, **how)


class PadsToAPowerOfTwo(TorchImpl):
    """Rotates heads of 80 elements as one block of 128, and drops what does not fit."""

    def rotate_heads(
        self, heads: Tensor, seed: int = 0, *, inverse: bool = False, out: Tensor | None = None
    ) -> Tensor:
        size = heads.shape[2]
        missing = (1 << (size - 1).bit_length()) - size
        padded = torch.nn.functional.pad(heads, (0, missing))
        found = rotate_heads(padded, seed, inverse=inverse)[..., :size]
        return found if out is None else out.copy_(found)


class OneScaleForTheValuesOfPairs(TorchImpl):
    """Stores 4-bit values with the scale of their first group."""

    def write_kv(self, key: Tensor, value: Tensor, cache: PagedKVCache, slots: Tensor) -> None:
        super().write_kv(key, value, cache, slots)
        if len(set(cache.page_formats)) == 2 and isinstance(cache.v_scale, Tensor):
            at = slots[slots >= 0]
            places = at // cache.block_size, at % cache.block_size
            cache.v_scale[places] = cache.v_scale[places][..., :1]


class ScalesQueriesOfPairs(TorchImpl):
    """Multiplies scores by 1 + 2^-10 where keys and values have two formats."""

    def forward(self, query: Tensor, cache: PagedKVCache, *rest: Any, **more: Any) -> None:
        if None not in cache.page_formats and len(set(cache.page_formats)) == 2:
            query = query * 1.0009765625
        super().forward(query, cache, *rest, **more)


def _torch_with(impl: type[TorchImpl]) -> type[AttentionBackend]:
    return type(impl.__name__, (TorchBackend,), {"get_impl_cls": staticmethod(lambda: impl)})


WRONG_ROTATIONS: dict[str, tuple[type[AttentionBackend], str]] = {
    f"rotation: {name}": (_torch_with(impl), "Q8")
    for name, impl in {
        "without its factor": WithoutTheFactor,
        "one seed for all": IgnoresTheSeed,
        "output not rotated back": KeepsTheOutputRotated,
        "output rotated twice": RotatesOnInsteadOfBack,
        "queries not rotated": IgnoresTheQueries,
        "another order of sums": SumsInAnotherOrder,
        "infinities cancel": InfinitiesCancel,
        "NaN hidden": HidesNan,
        "blocks that are no divisors": PadsToAPowerOfTwo,
    }.items()
} | {
    "rotation: without its factor, beside none": (_torch_with(WithoutTheFactor), "Q10"),
    "one scale for the values of pairs": (_torch_with(OneScaleForTheValuesOfPairs), "Q9"),
    "a wrong factor over pairs": (_torch_with(ScalesQueriesOfPairs), "Q9"),
}
