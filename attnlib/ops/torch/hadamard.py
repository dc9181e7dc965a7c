"""Rotation of heads for the cache (P15)."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.kv_rotation import rotation_block
from attnlib.ops.hadamard import LARGEST_INPUT, check_heads, sign_table, unit_factor

__all__ = ["rotate_heads"]


@torch.no_grad()
def rotate_heads(
    heads: Tensor, seed: int = 0, *, inverse: bool = False, out: Tensor | None = None
) -> Tensor:
    """Rotate each head; `ops.hadamard` defines the arithmetic (P15).

    Args:
        heads: `[T, H, D]`, last stride 1.
        seed: of the signs.
        inverse: rotate back.
        out: like `heads`, which it may be; None allocates.

    Returns:
        `[T, H, D]` in the dtype of `heads`; `out` if given.

    Raises:
        ContractError: a tensor of another shape, dtype or device.
    """
    check_heads(heads, out)
    size, wide = heads.shape[2], torch.promote_types(heads.dtype, torch.float32)
    block, signs = rotation_block(size), sign_table(seed, heads.device, size).to(wide)
    x = heads.to(wide).clamp(-LARGEST_INPUT, LARGEST_INPUT)
    if not inverse:
        x = x * signs
    half = block // 2
    while half:
        first, second = x.reshape(*heads.shape[:2], size // (2 * half), 2, half).unbind(3)
        x = torch.stack((first + second, first - second), 3)
        half //= 2
    x = x.reshape(heads.shape) * unit_factor(size)
    if inverse:
        x = x * signs + 0.0
    largest = torch.finfo(heads.dtype).max
    x = x.clamp(-largest, largest).to(heads.dtype)
    return x if out is None else out.copy_(x)
