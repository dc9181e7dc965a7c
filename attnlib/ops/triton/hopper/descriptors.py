"""TMA descriptors of a paged cache and of queries, and the cache of their encoded forms.

A cache view [B, N, Hkv, D] of any strides is described as [B, Hkv, N, D], so that a box is the rows
of one page and one KV head. A descriptor holds an address and keeps no tensor alive.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import TensorDescriptor
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES, LaunchCache
from attnlib.ops.triton.launch.sequence import Lookup, Source

__all__ = [
    "Address",
    "CacheView",
    "QueryView",
    "TransposedView",
    "View",
    "described",
    "descriptor_arguments",
    "encode_views",
    "encoded_descriptors",
    "gathered_strides",
    "tma_strides",
]

_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.int16: tl.int16}
_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


class Address:
    """The part of a tensor that a descriptor reads."""

    __slots__ = ("_pointer", "dtype")

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self._pointer = pointer
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._pointer


def tma_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """The strides for a descriptor: a dimension of size 1 has any stride (P1), but TMA requires a
    multiple of 16 bytes."""
    return [8 if n == 1 else s for n, s in zip(shape, strides, strict=False)]


class View(Protocol):
    """What a descriptor follows from besides the address of its tensor."""

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Shape and strides of the descriptor."""

    def describe(self, pointer: int) -> TensorDescriptor:
        """The descriptor of a tensor at this address."""


class CacheView(NamedTuple):
    """What the descriptor of a cache `[B, N, Hkv, D]` follows from besides its address.

    A cache of float8 or int8 is described as int16 words of two neighboring elements.

    Attributes:
        dtype, shape, strides: of the view, in elements or words.
        rows: positions of one TMA box.
        width: elements or words of one box, >= D. Elements past D and pages past B read as zero.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int
    width: int

    @classmethod
    def of(cls, cache: Tensor, rows: int, width: int) -> CacheView:
        """The view of a cache tensor; `width` counts its elements."""
        shape, strides = tuple(cache.shape), tuple(cache.stride())
        if cache.dtype not in _BYTES:
            return cls(cache.dtype, shape, strides, rows, width)
        shape, strides = (*shape[:3], shape[3] // 2), tuple(stride // 2 for stride in strides[:3])
        per_word = 4 if cache.dtype == torch.uint8 else 2
        return cls(torch.int16, shape, (*strides, 1), rows, width // per_word)

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Shape and strides of the descriptor."""
        blocks, positions, heads, size = self.shape
        block, position, head = tma_strides(self.shape[:3], self.strides)
        return [blocks, heads, positions, size], [block, head, position, 1]

    def describe(self, pointer: int) -> TensorDescriptor:
        """The descriptor of a cache at this address."""
        layout = gl.NVMMASharedLayout.get_default_for([self.rows, self.width], _DTYPES[self.dtype])
        return TensorDescriptor(
            Address(pointer, self.dtype),
            *self.sizes,
            [1, 1, self.rows, self.width],
            gl.NVMMASharedLayout(layout.swizzle_byte_width, 16, 4),
        )


class QueryView(NamedTuple):
    """What the descriptor of queries `[T, Hq, D]` follows from besides their address.

    Attributes:
        dtype, shape, strides: of the queries.
        tokens, heads: of one TMA box.
        width: elements of one box, >= D.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tokens: int
    heads: int
    width: int

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Shape and strides of the descriptor."""
        return list(self.shape), [*tma_strides(self.shape[:2], self.strides), 1]

    def describe(self, pointer: int) -> TensorDescriptor:
        """The descriptor of queries at this address."""
        rows = self.tokens * self.heads
        layout = gl.NVMMASharedLayout.get_default_for([rows, self.width], _DTYPES[self.dtype])
        return TensorDescriptor(
            Address(pointer, self.dtype),
            *self.sizes,
            [self.tokens, self.heads, self.width],
            gl.NVMMASharedLayout(layout.swizzle_byte_width, 16, 3),
        )


class TransposedView(NamedTuple):
    """What the descriptor of transposed float8 values `[rows, columns]` follows from besides their
    address. They are described as 16-bit words of two neighboring columns.

    Attributes:
        shape: rows and columns of the tensor, which is contiguous.
        box: rows and columns of one TMA box.
    """

    shape: tuple[int, int]
    box: tuple[int, int]

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Shape and strides of the descriptor."""
        rows, columns = self.shape
        return [rows, columns // 2], [columns // 2, 1]

    def describe(self, pointer: int) -> TensorDescriptor:
        """The descriptor of values at this address."""
        box = [self.box[0], self.box[1] // 2]
        layout = gl.NVMMASharedLayout.get_default_for(box, tl.int16)
        return TensorDescriptor(Address(pointer, torch.int16), *self.sizes, box, layout)


def descriptor_arguments(
    views: tuple[View, ...], sources: tuple[Source, ...], direct: bool
) -> tuple[Any, ...]:
    """The arguments in place of descriptors, for `bind_step`: each call gives the descriptors. A
    direct launch also takes their shapes and strides, which do not change."""
    if not direct:
        return sources
    arguments: list[Any] = []
    for view, source in zip(views, sources, strict=True):
        shape, strides = view.sizes
        arguments += [source, *shape, *strides]
    return tuple(arguments)


def described(
    views: tuple[View, ...], sources: tuple[Source, ...], maps: tuple[Source, ...]
) -> Lookup:
    """For launches by Triton, which encodes a descriptor in each call: the descriptors `maps` of
    the tensors `sources`."""

    def describe(*tensors: Tensor) -> tuple[Any, ...]:
        return tuple(
            view.describe(tensor.data_ptr()) for view, tensor in zip(views, tensors, strict=True)
        )

    return Lookup(sources, {}, describe, maps)


def encoded_descriptors(facts: Hashable, launch: BoundLaunch) -> LaunchCache:
    """Encoded descriptors by address, shared by all launches that agree in `facts` (the views) and
    in how their kernel reads descriptors: the layers of a model have one cache each, and there is
    one launch for every batch size."""
    key = ("descriptors", facts, launch.descriptor_layout)
    found: LaunchCache | None = LAUNCHES.get(key)
    if found is None:
        found = LaunchCache()
        LAUNCHES.keep(key, found)
    return found


def encode_views(
    encoded: LaunchCache,
    launch: BoundLaunch,
    views: tuple[View, ...],
    addresses: Any,
    first: int = 0,
) -> tuple[Any, ...]:
    """Encode the descriptors of tensors at these addresses, and keep them in `encoded`.

    Args:
        encoded: of these views and this launch (`encoded_descriptors`).
        addresses: one address per view as a tuple, or the address of a single view; the key in
            `encoded`.
        first: number of the first of these descriptors among those of the kernel.
    """
    encode = launch.encode
    assert encode is not None  # every kernel with descriptors that was launched directly has it
    pointers = addresses if isinstance(addresses, tuple) else (addresses,)
    found = tuple(
        encode(number, view.describe(pointer))
        for number, (view, pointer) in enumerate(zip(views, pointers, strict=True), first)
    )
    encoded.keep(addresses, found)
    return found


def gathered_strides(key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return the strides of both caches [B, N, Hkv, D] in blocks, rows and heads, in bytes, for
    kernels that gather rows. The launcher has checked that they are multiples of 16."""
    size = key.element_size()
    return tuple(stride * size for stride in (*key.stride()[:3], *value.stride()[:3]))
