"""Tensors in the memory forms of a draw, made without code of the library.

A tensor is built on the CPU inside a larger allocation, and the whole allocation is moved to the
device, so that strides, offsets and surrounding memory are the same there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

__all__ = [
    "CacheMemory",
    "cache_views",
    "int_form",
    "move",
    "poison_of",
    "raw_bytes",
    "strided_form",
]

Tensor = torch.Tensor

_ORDERS = {  # docs/paged-cache.md, "Layouts"
    "NHD": ("kv", "block", "token", "head", "element"),
    "HND": ("kv", "block", "head", "token", "element"),
    "NHD_INTERLEAVED": ("block", "kv", "token", "head", "element"),
    "HND_INTERLEAVED": ("block", "kv", "head", "token", "element"),
    "NHD_PACKED": ("block", "token", "head", "kv", "element"),
    "HND_PACKED": ("block", "head", "token", "kv", "element"),
}


@dataclass(frozen=True)
class CacheMemory:
    """Strides of the views of a cache over one allocation.

    Attributes:
        num_elements: of the allocation.
        shapes, strides, offsets: of the key view and the value view.
    """

    num_elements: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    offsets: tuple[int, int]

    def views(self, allocation: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, Hkv, D] and [B, N, Hkv, Dv]."""
        key, value = (
            allocation.as_strided(shape, stride, offset)
            for shape, stride, offset in zip(self.shapes, self.strides, self.offsets, strict=True)
        )
        return key, value


def cache_views(
    form: str, blocks: int, tokens: int, heads: int, size: int, size_v: int, aliased: bool
) -> CacheMemory:
    """The views of a cache in a named layout, or in "padded" or "misaligned" memory.

    Args:
        form: see `Forms.cache`.
        blocks, tokens, heads, size, size_v: B, N, Hkv, D and Dv.
        aliased: values are a prefix of the keys (MLA).
    """
    shapes = (blocks, tokens, heads, size), (blocks, tokens, heads, size_v)
    if form in ("padded", "misaligned") or aliased:
        gap, offset = (8, 16) if form == "padded" else (0, 1 if form == "misaligned" else 0)
        strides, lengths = [], []
        for width in (size, size_v):
            token = heads * width + gap
            strides.append((tokens * token + 3 * gap, token, width, 1))
            lengths.append(blocks * (tokens * token + 3 * gap))
        if aliased:
            both = (strides[0], strides[0])
            return CacheMemory(offset + lengths[0] + 1, shapes, both, (offset, offset))
        offsets = (offset, offset + lengths[0] + offset)
        return CacheMemory(offsets[1] + lengths[1] + 1, shapes, (strides[0], strides[1]), offsets)
    order = _ORDERS[form]
    inside = order[order.index("kv") + 1 :]
    found = []
    sizes = {"block": blocks, "token": tokens, "head": heads}
    parts = [prod({**sizes, "element": width}[axis] for axis in inside) for width in (size, size_v)]
    for width in (size, size_v):
        step, stride = 1, {}
        for axis in reversed(order):
            if axis == "kv":
                step = sum(parts)  # what is outside the K|V axis steps over both
            else:
                stride[axis] = step
                step *= {**sizes, "element": width}[axis]
        found.append(tuple(stride[axis] for axis in ("block", "token", "head", "element")))
    total = blocks * tokens * heads * (size + size_v)
    return CacheMemory(total, shapes, (found[0], found[1]), (0, parts[0]))


def poison_of(dtype: torch.dtype, kind: str) -> Tensor:
    """One element of memory that must not be read, as a 0-d tensor of `dtype`."""
    if kind == "zero":
        return torch.zeros((), dtype=dtype)
    if kind == "huge":
        return torch.tensor(torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    value = float("inf") if kind == "inf" and dtype != torch.float8_e4m3fn else float("nan")
    return torch.tensor(value).to(dtype)


def raw_bytes(tensor: Tensor) -> Tensor:
    """The whole allocation under a tensor, as bytes on the CPU."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage()).cpu()  # type: ignore[call-overload]


def move(tensor: Tensor, device: str) -> Tensor:
    """The same view of a copy of the whole allocation on another device."""
    if device == "cpu":
        return tensor
    base = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def strided_form(values: Tensor, form: str, around: float) -> Tensor:
    """`values` [T, H, D] in another memory form; unused memory holds `around`."""
    rows, heads, size = values.shape
    if form == "gaps":
        buffer = torch.full((rows, heads + 1, size + 8), around, dtype=values.dtype)
        view = buffer[:, :heads, :size]
    elif form == "transposed":
        view = torch.full((heads, rows, size), around, dtype=values.dtype).transpose(0, 1)
    elif form == "misaligned":
        view = torch.full((values.numel() + 2,), around, dtype=values.dtype)[1:-1].view(
            rows, heads, size
        )
    else:
        return values.contiguous()
    view.copy_(values)
    return view


def int_form(values: Tensor, form: str, around: int) -> Tensor:
    """Metadata in another memory form; unused memory holds `around`."""
    if form == "contiguous":
        return values
    step = 2 if form == "strided" else 1
    lead: Sequence[int] = [1] * values.dim()
    sizes = [count + size * step for count, size in zip(lead, values.shape, strict=True)]
    buffer = torch.full(sizes, around, dtype=values.dtype)
    view = buffer[tuple(slice(1, 1 + size * step, step) for size in values.shape)]
    view.copy_(values)
    return view
