"""Rotation of heads for the cache (P15), built without library code: element by element, with the
sums in the order of the rule."""

from __future__ import annotations

import hashlib
import math

import torch

__all__ = ["rotate_reference", "rotates_side"]


def rotates_side(text: str | None, side: str) -> bool:
    """Whether a rotation such as "hadamard_keys@3" rotates "keys" or "values"."""
    return text is not None and text.partition("@")[0] in ("hadamard", f"hadamard_{side}")


def rotate_reference(
    heads: torch.Tensor, text: str | None, side: str, *, inverse: bool = False
) -> torch.Tensor:
    """Heads `[..., D]` rotated as `text` says, in their dtype.

    Args:
        heads: queries, keys, values or outputs.
        text: the rotation; None for none.
        side: "keys" (also for queries) or "values" (also for outputs).
        inverse: rotate back.
    """
    if text is None or not rotates_side(text, side):
        return heads
    size, wide = heads.shape[-1], torch.promote_types(heads.dtype, torch.float32)
    bits = hashlib.shake_256(f"hadamard {size} {int(text.partition('@')[2] or 0)}".encode())
    number = int.from_bytes(bits.digest((size + 7) // 8), "little")
    signs = torch.tensor([1.0 - 2.0 * (number >> i & 1) for i in range(size)], dtype=wide)
    signs = signs.to(heads.device)
    block = math.gcd(size, 1 << 62)
    limit = torch.tensor(2.0**117, dtype=wide)
    x = torch.minimum(
        torch.maximum(heads.to(wide), -limit.to(heads.device)), limit.to(heads.device)
    )
    if not inverse:
        x = x * signs
    columns = list(x.unbind(-1))
    half = block // 2
    while half:
        for i in range(size):
            if not i % block & half:
                a, b = columns[i], columns[i + half]
                columns[i], columns[i + half] = a + b, a - b
        half //= 2
    x = torch.stack(columns, -1) * float(torch.tensor(block**-0.5, dtype=torch.float32))
    if inverse:
        x = x * signs + 0.0
    largest = torch.finfo(heads.dtype).max
    return x.clamp(-largest, largest).to(heads.dtype)
