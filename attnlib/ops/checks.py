"""Argument checks that the counterparts of an operation share."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError

__all__ = ["check_slots", "check_visible_keys", "check_writable", "vector_elements"]


def check_slots(key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Check the slots of a cache write.

    Args:
        key: `[T', Hkv, D]`.
        value: `[T', Hkv, Dv]`.
        slot_mapping: `[T]`.

    Raises:
        ContractError: `slot_mapping` is not int64 or has other dimensions, or there are fewer keys
            or values than slots (P4).
    """
    if slot_mapping.dtype != torch.int64:
        raise ContractError(
            f"slot_mapping has dtype {slot_mapping.dtype}; convert it to torch.int64", rule="P4"
        )
    if slot_mapping.dim() != 1:
        raise ContractError(
            f"slot_mapping has shape {tuple(slot_mapping.shape)}; it must be [T], flatten it",
            rule="P4",
        )
    num_tokens = slot_mapping.shape[0]
    for name, rows in (("key", key), ("value", value)):
        if rows.shape[0] < num_tokens:
            raise ContractError(
                f"{name} has {rows.shape[0]} tokens, but slot_mapping has {num_tokens}; pass one "
                "row per slot, or a shorter slot_mapping",
                rule="P4",
            )


def check_writable(**tensors: Tensor | None) -> None:
    """Whether torch operations may write tensors now. torch says so after the first write.

    Args:
        tensors: by the names of arguments.

    Raises:
        ContractError: one was made in inference mode, and the call is outside of it.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_inference():
            raise ContractError(
                f"memory of {name} was made in torch.inference_mode, and torch refuses to write "
                "it outside: call under torch.inference_mode(), or allocate it under "
                "torch.inference_mode(False)"
            )


def check_visible_keys(visible: Tensor, table: Tensor, lengths: Tensor, starts: Tensor) -> None:
    """Check the tensors of `list_visible_keys`.

    Raises:
        ContractError: tensors of other shapes, dtypes or strides.
    """
    rows = visible.shape[0]
    for name, tensor, dtype, dims in (
        ("visible", visible, torch.bool, 2),
        ("table", table, torch.int32, 2),
        ("lengths", lengths, torch.int32, 1),
        ("starts", starts, torch.int32, 1),
    ):
        dense = tensor.dim() == dims and (tensor.shape[-1] <= 1 or tensor.stride(-1) == 1)
        count = rows + 1 if name == "starts" else rows
        if not dense or tensor.dtype != dtype or tensor.shape[0] != count:
            raise ContractError(
                f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()} and dtype "
                f"{tensor.dtype}; it must be {dtype} with {dims} dimensions, {count} rows and a "
                "dense last dimension"
            )


def vector_elements(name: str, tensor: Tensor) -> int:
    """Elements per 16 bytes where every row starts on a 16-byte boundary, given that the tensor
    does; else 1.

    Args:
        name: of the tensor, for the error.
        tensor: `[..., rows, heads, size]`; pages have their stride before these.

    Raises:
        ContractError: the last dimension is not dense (P1).
    """
    shape, strides = tensor.shape, tensor.stride()
    if strides[-1] != 1 and shape[-1] > 1:
        raise ContractError(
            f"{name} has last stride {strides[-1]}; make its last dimension dense", rule="P1"
        )
    elements = 16 // tensor.element_size()
    for stride in strides[:-3]:
        if stride % elements:
            return 1
    for stride, size in zip(strides[-3:-1], shape[-3:-1], strict=True):
        if size > 1 and stride % elements:
            return 1
    return elements
