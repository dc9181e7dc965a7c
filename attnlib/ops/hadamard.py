"""Rotation of heads for the cache: signs and checks of both counterparts.

The arithmetic (P15), in float32 (float64 for float64 heads), with one rounding per operation. B is
the largest power of two that divides the head size; blocks of B elements are rotated by themselves.

1. Elements are clamped to 2^117 in magnitude, so that no sum overflows; NaN stays NaN.
2. Each element is multiplied by its sign.
3. For h = B/2, B/4, ..., 1, elements i and i + h become their sum and their difference, for all i
   whose bit h is 0.
4. Elements are multiplied by 1 / sqrt(B), rounded to float32, saturated at the largest finite
   number of their dtype, and rounded to it.

The inverse takes step 2 after the multiplication of step 4, and adds 0, so that it returns no -0.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.kv_rotation import rotation_block, rotation_signs

__all__ = ["LARGEST_INPUT", "check_heads", "sign_table", "unit_factor"]

LARGEST_INPUT = 2.0**117


@functools.lru_cache(maxsize=64)
def sign_table(seed: int, device: torch.device, *head_sizes: int) -> Tensor:
    """The signs of heads of these sizes, one after the other: `[sum of D]` float32 on a device."""
    signs = [sign for size in head_sizes for sign in rotation_signs(size, seed)]
    return torch.tensor(signs, dtype=torch.float32, device=device)


def unit_factor(head_size: int) -> float:
    """1 / sqrt(B) as a float32 number."""
    block = float(rotation_block(head_size))
    exact = torch.tensor(block, dtype=torch.float64, device="cpu").rsqrt()
    return float(exact.float())


def check_heads(heads: Tensor, out: Tensor | None) -> None:
    """Check heads to rotate, and where to write them.

    Raises:
        ContractError: heads that are not floating-point `[T, H, D]` with last stride 1, or an
            `out` that is not like them (P15).
    """
    if heads.dim() != 3 or not heads.is_floating_point() or heads.stride(2) != 1:
        raise ContractError(
            f"heads are {heads.dtype} {tuple(heads.shape)} with strides {heads.stride()}; they "
            "must be floating-point [T, heads, head_size] with last stride 1",
            rule="P15",
        )
    if out is not None and (
        (out.shape, out.dtype, out.device) != (heads.shape, heads.dtype, heads.device)
        or out.stride(2) != 1
    ):
        raise ContractError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()} on {out.device}; "
            f"it must be {heads.dtype} {tuple(heads.shape)} on {heads.device} with last stride 1",
            rule="P15",
        )
