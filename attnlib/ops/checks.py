"""Argument checks that the counterparts of an operation share."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError

__all__ = ["check_slots"]


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
