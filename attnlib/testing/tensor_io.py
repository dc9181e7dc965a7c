"""Serialize tensors with their strides.

`torch.save` writes the whole storage under a view; for one layer of a paged cache, that is the
whole pool. This module stores the packed elements and the strides. Unpacking allocates only the
memory that the strides span. Key and value views of one allocation share one allocation again.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["pack_cache_views", "pack_tensor", "unpack_cache_views", "unpack_tensor"]

PackedTensor = dict[str, Any]


def _as_indexable(tensor: torch.Tensor) -> torch.Tensor:
    """View fp8 tensors as bytes, because some torch builds cannot index or copy fp8."""
    return (
        tensor.view(torch.uint8)
        if tensor.element_size() == 1 and tensor.dtype.is_floating_point
        else tensor
    )


def _num_spanned_elements(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Number of elements from the first to the last element of a view."""
    return (
        0
        if 0 in shape
        else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    )


def pack_tensor(tensor: torch.Tensor) -> PackedTensor:
    """Pack a tensor into contiguous CPU data and its strides."""
    return {"data": tensor.detach().cpu().contiguous(), "stride": tuple(tensor.stride())}


def unpack_tensor(packed: PackedTensor, device: torch.device | str) -> torch.Tensor:
    """Restore a tensor with its strides in newly allocated memory."""
    data, stride = packed["data"], packed["stride"]
    memory = torch.zeros(
        max(_num_spanned_elements(tuple(data.shape), stride), 1), dtype=data.dtype, device=device
    )
    view = memory.as_strided(data.shape, stride)
    _as_indexable(view).copy_(_as_indexable(data))
    return view


def pack_cache_views(key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor) -> PackedTensor:
    """Pack some blocks of a key view and a value view, with their relative position in memory.

    Args:
        key: [B, N, Hkv, D].
        value: [B, N, Hkv, Dv].
        blocks: [P] int64 indices of the blocks to keep.
    """
    shared = key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    offset = value.storage_offset() - key.storage_offset()
    return {
        "key": _as_indexable(key)[blocks].cpu().contiguous().view(key.dtype),
        "value": _as_indexable(value)[blocks].cpu().contiguous().view(value.dtype),
        "key_stride": tuple(key.stride()),
        "value_stride": tuple(value.stride()),
        # An offset within one block belongs to the layout (interleaved, packed, aliased).
        "value_offset": offset if shared and 0 <= offset < key.stride(0) else None,
    }


def unpack_cache_views(
    packed: PackedTensor, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Restore the key view and the value view over the packed blocks, or over a block of zeros."""
    key, value, offset = packed["key"], packed["value"], packed["value_offset"]
    if not len(key):  # a batch without tokens; no cache of a layer is empty
        key, value = (side.new_zeros(1, *side.shape[1:]) for side in (key, value))
    key_stride, value_stride = packed["key_stride"], packed["value_stride"]
    if offset is None:
        return unpack_tensor({"data": key, "stride": key_stride}, device), unpack_tensor(
            {"data": value, "stride": value_stride}, device
        )
    num_elements = max(
        _num_spanned_elements(tuple(key.shape), key_stride),
        offset + _num_spanned_elements(tuple(value.shape), value_stride),
        1,
    )
    memory = torch.zeros(num_elements, dtype=key.dtype, device=device)
    views = (
        memory.as_strided(key.shape, key_stride),
        memory.as_strided(value.shape, value_stride, offset),
    )
    for view, data in zip(views, (key, value), strict=True):
        _as_indexable(view).copy_(_as_indexable(data))
    return views
