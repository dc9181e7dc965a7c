"""TMA descriptors of the packed caches of vLLM's PagedAttention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.descriptors import Address, tma_strides
from attnlib.ops.triton.hopper.kernels.compat import TensorDescriptor

__all__ = ["PackedKeyView", "PackedValueView"]


class PackedKeyView(NamedTuple):
    """What the descriptor of a packed key cache `[B, Hkv, D / 8, N, 8]` follows from besides its
    address. It is described as `[B, Hkv, N / 8, D / 8, 64]`: TMA writes units of 8 keys one after
    the other, see `cache_tiles`.

    Attributes:
        dtype, shape, strides: of the cache.
        rows: positions of one TMA box, a multiple of 8.
        width: head size of one box, >= D. Elements past D and pages past B read as zero.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int
    width: int

    @classmethod
    def of(cls, cache: Tensor, rows: int, width: int) -> PackedKeyView:
        """The view of a cache tensor."""
        return cls(cache.dtype, tuple(cache.shape), tuple(cache.stride()), rows, width)

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Shape and strides of the descriptor."""
        blocks, heads, groups, positions, _ = self.shape
        block, head = tma_strides(self.shape[:2], self.strides)
        return [blocks, heads, positions // 8, groups, 64], [block, head, 64, 8 * positions, 1]

    def describe(self, pointer: int) -> TensorDescriptor:
        """The descriptor of a cache at this address."""
        box = [1, 1, self.rows // 8, self.width // 8, 64]
        return TensorDescriptor(
            Address(pointer, self.dtype), *self.sizes, box, gl.NVMMASharedLayout(0, 16, 5)
        )


class PackedValueView(NamedTuple):
    """What the descriptor of a packed value cache `[B, Hkv, D, N]` follows from besides its
    address.

    Attributes:
        dtype, shape, strides: of the cache.
        rows: positions of one TMA box, at most 64.
        width: head size of one box, >= D. Elements past D and pages past B read as zero.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int
    width: int

    @classmethod
    def of(cls, cache: Tensor, rows: int, width: int) -> PackedValueView:
        """The view of a cache tensor."""
        return cls(cache.dtype, tuple(cache.shape), tuple(cache.stride()), rows, width)

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Shape and strides of the descriptor."""
        return list(self.shape), [*tma_strides(self.shape[:3], self.strides), 1]

    def describe(self, pointer: int) -> TensorDescriptor:
        """The descriptor of a cache at this address."""
        return TensorDescriptor(
            Address(pointer, self.dtype),
            *self.sizes,
            [1, 1, self.width, self.rows],
            gl.NVMMASharedLayout(2 * self.rows, 16, 4),
        )
