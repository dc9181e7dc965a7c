"""Checks and views of the tensors of other engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlib.errors import ContractError

if TYPE_CHECKING:
    pass

__all__ = ["by_token", "check_shape", "keys_and_values", "not_paged", "typed"]


def typed(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor with the dtype of its elements."""
    _check_tensor(name, tensor)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ContractError(f"dtype={dtype!r} must be a dtype, such as torch.float8_e4m3fn")
    if dtype is None:
        if tensor.dtype == torch.uint8:
            raise ContractError(
                f"{name} is {tensor.dtype}: pass the dtype that the bytes hold, for example "
                "dtype=torch.float8_e4m3fn",
                rule="P1",
            )
        return tensor
    if dtype.itemsize != tensor.dtype.itemsize:
        raise ContractError(
            f"{name} is {tensor.dtype} and cannot be viewed as dtype={dtype}: the sizes differ",
            rule="P1",
        )
    return tensor.view(dtype)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        given = getattr(tensor, "layout", type(tensor).__name__)
        raise ContractError(
            f"{name} is a {given}; it must be a dense tensor: pass it once the engine has "
            "allocated its cache",
            rule="P1",
        )


def check_shape(name: str, tensor: torch.Tensor, dims: int, expected: str) -> None:
    _check_tensor(name, tensor)
    if tensor.dim() != dims:
        raise ContractError(
            f"{name} has shape {tuple(tensor.shape)}; it must be {expected}", rule="P1"
        )


def keys_and_values(name: str, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves along dimension 1."""
    _check_tensor(name, kv)
    if kv.dim() != 5 or kv.shape[1] != 2:
        raise ContractError(
            f"{name} has shape {tuple(kv.shape)}; it must be [B, 2, N, Hkv, D] or "
            "[B, 2, Hkv, N, D]",
            rule="P1",
        )
    return kv[:, 0], kv[:, 1]


def by_token(view: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """`[B, N, Hkv, D]` of a view in a layout."""
    if kv_layout not in ("NHD", "HND"):
        raise ContractError(f"kv_layout={kv_layout!r} must be 'NHD' or 'HND'", rule="P2")
    return view if kv_layout == "NHD" else view.transpose(1, 2)


def not_paged(layer_idx: int, unknown: bool) -> str:
    reason = "is not in this cache" if unknown else "is a sliding layer, stored as a ring buffer"
    return f"layer {layer_idx} {reason}: pass the index of a full-attention layer"
