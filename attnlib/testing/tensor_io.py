"""Tensors that keep their strides through a file.

`torch.save` writes the whole storage under a view, which for one layer of a paged cache is the whole pool. Here a
tensor is its packed data plus its strides; thawing lays the data out with the same strides in as little memory as they
allow. A key and a value view of one allocation stay in one allocation.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["pack_tensor", "pack_cache_views", "unpack_tensor", "unpack_cache_views"]

PackedTensor = dict[str, Any]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.view(torch.uint8)
        if tensor.element_size() == 1 and tensor.dtype.is_floating_point
        else tensor
    )


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements that a view spans, first to last."""
    return (
        0
        if 0 in shape
        else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    )


def pack_tensor(tensor: torch.Tensor) -> PackedTensor:
    """A tensor as packed data and strides."""
    return {"data": tensor.detach().cpu().contiguous(), "stride": tuple(tensor.stride())}


def unpack_tensor(packed: PackedTensor, device: torch.device | str) -> torch.Tensor:
    """The tensor again, with its strides, over memory of its own."""
    data, stride = packed["data"], packed["stride"]
    memory = torch.zeros(
        max(_extent(tuple(data.shape), stride), 1), dtype=data.dtype, device=device
    )
    view = memory.as_strided(data.shape, stride)
    _raw(view).copy_(_raw(data))
    return view


def pack_cache_views(key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor) -> PackedTensor:
    """Some pages of a key and a value view [B, N, H, D], and how the two lie to each other."""
    shared = key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    offset = value.storage_offset() - key.storage_offset()
    return {
        "key": _raw(key)[pages].cpu().contiguous().view(key.dtype),
        "value": _raw(value)[pages].cpu().contiguous().view(value.dtype),
        "key_stride": tuple(key.stride()),
        "value_stride": tuple(value.stride()),
        # Within one block's stride of each other (interleaved, packed, aliased), their distance is part of the layout.
        "value_offset": offset if shared and 0 <= offset < key.stride(0) else None,
    }


def unpack_cache_views(
    packed: PackedTensor, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two views again, over as many pages as were kept."""
    key, value, offset = packed["key"], packed["value"], packed["value_offset"]
    key_stride, value_stride = packed["key_stride"], packed["value_stride"]
    if offset is None:
        return unpack_tensor({"data": key, "stride": key_stride}, device), unpack_tensor(
            {"data": value, "stride": value_stride}, device
        )
    span = max(
        _extent(tuple(key.shape), key_stride), offset + _extent(tuple(value.shape), value_stride), 1
    )
    memory = torch.zeros(span, dtype=key.dtype, device=device)
    views = (
        memory.as_strided(key.shape, key_stride),
        memory.as_strided(value.shape, value_stride, offset),
    )
    for view, data in zip(views, (key, value), strict=True):
        _raw(view).copy_(_raw(data))
    return views
