"""TMA descriptors of a paged cache and of queries.

A cache view [B, N, Hkv, D] of any strides is described as [B, Hkv, N, D], so that a box is the rows of one page and one
KV head. Descriptors are kept by address and shape, because checking and building one costs microseconds; they hold the
address alone and keep no tensor alive. So do their encoded forms, which `Encoded` keeps for bound launches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import TensorDescriptor
from attnlib.ops.triton.launch.bound import BoundLaunch, Remembered

__all__ = ["Encoded", "cache_descriptor", "cache_facts", "query_descriptor"]

_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class _Address:
    """What a descriptor asks of a tensor."""

    __slots__ = ("_pointer", "dtype")

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self._pointer = pointer
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._pointer


@functools.lru_cache(maxsize=512)
def _describe(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    rows: int,
    width: int,
) -> TensorDescriptor:
    blocks, positions, heads, size = shape
    # The stride of a dimension of size 1 is arbitrary (P1), and TMA wants a multiple of 16 bytes.
    block, position, head = (
        8 if n == 1 else s for n, s in zip(shape[:3], strides[:3], strict=True)
    )
    layout = gl.NVMMASharedLayout.get_default_for([rows, width], _DTYPES[dtype])
    return TensorDescriptor(
        _Address(pointer, dtype),
        [blocks, heads, positions, size],
        [block, head, position, 1],
        [1, 1, rows, width],
        gl.NVMMASharedLayout(layout.swizzle_byte_width, 16, 4),
    )


def cache_descriptor(cache: Tensor, rows: int, width: int) -> TensorDescriptor:
    """The descriptor of a cache `[B, N, Hkv, D]` for boxes of `rows` positions and `width` >= D elements.

    Elements past D and pages past B read as zero.
    """
    return _describe(
        cache.data_ptr(), cache.dtype, tuple(cache.shape), tuple(cache.stride()), rows, width
    )


@functools.lru_cache(maxsize=512)
def _describe_query(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    tokens: int,
    heads: int,
    width: int,
) -> TensorDescriptor:
    token, head = (8 if n == 1 else s for n, s in zip(shape[:2], strides[:2], strict=True))
    layout = gl.NVMMASharedLayout.get_default_for([tokens * heads, width], _DTYPES[dtype])
    return TensorDescriptor(
        _Address(pointer, dtype), list(shape), [token, head, 1], [tokens, heads, width],
        gl.NVMMASharedLayout(layout.swizzle_byte_width, 16, 3),
    )  # fmt: skip


def query_descriptor(query: Tensor, tokens: int, heads: int, width: int) -> TensorDescriptor:
    """The descriptor of queries `[T, Hq, D]` for boxes of `heads` heads of `tokens` tokens and `width` >= D elements."""
    return _describe_query(
        query.data_ptr(),
        query.dtype,
        tuple(query.shape),
        tuple(query.stride()),
        tokens,
        heads,
        width,
    )


def cache_facts(key: Tensor, value: Tensor, *boxes: int) -> Hashable:
    """All but the addresses that the descriptors of a pair of caches follow from."""
    return key.dtype, tuple(key.shape), key.stride(), tuple(value.shape), value.stride(), boxes


class Encoded:
    """The encoded descriptors of tensors that differ in their addresses only, as a bound launch takes them.

    Launches that agree in `facts` and in how their kernel reads descriptors share what is encoded: the layers of a model
    have one cache each, and a launch for every batch size.

    Args:
        facts: all that the descriptors follow from beside the addresses.
        first: the number of the first descriptor among those of the kernel.
    """

    __slots__ = ("_facts", "_first", "_maps", "_number")

    def __init__(self, facts: Hashable, first: int) -> None:
        self._facts = facts
        self._first = first
        self._maps: str | None = None
        self._number = -1

    def find(self, launch: BoundLaunch, *addresses: int) -> tuple[Any, ...] | None:
        """The arguments for tensors at these addresses; None when they have not been kept. `launch` is ready."""
        if self._maps is not launch.maps:
            kind = (self._facts, launch.maps)
            number = _kinds.get(kind)
            self._number = _kinds.keep(kind, next(_numbers)) if number is None else number
            self._maps = launch.maps
        return _encoded.get((self._number, *addresses))

    def keep(
        self, launch: BoundLaunch, addresses: tuple[int, ...], *descriptors: TensorDescriptor
    ) -> tuple[Any, ...]:
        """Encode and remember the descriptors of the tensors that `find` was asked for in vain."""
        expanded = (
            part
            for number, descriptor in enumerate(descriptors, self._first)
            for part in launch.expand(number, descriptor)
        )
        return _encoded.keep((self._number, *addresses), tuple(expanded))


_numbers = itertools.count()
_kinds: Remembered[int] = Remembered()
_encoded: Remembered[tuple[Any, ...]] = Remembered()
