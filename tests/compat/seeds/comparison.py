"""Whether a result is that of the original."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["difference"]

TOLERANCE = 2e-5
"""Of float32 elements: attention in another order of sums."""


def difference(ours: Any, original: Any, where: str = "the result") -> str | None:
    """What differs between two results; None if nothing does.

    Types, dtypes and shapes must be equal, elements of floating point close, all else equal.
    """
    if isinstance(original, torch.Tensor):
        return _tensors(ours, original, where)
    if isinstance(original, np.ndarray):
        if not isinstance(ours, np.ndarray) or ours.dtype != original.dtype:
            return f"{where} is {ours!r}, originally {original!r}"
        return difference(ours.tolist(), original.tolist(), where)
    if isinstance(original, Mapping):
        if not isinstance(ours, Mapping) or list(ours) != list(original):
            return f"{where} is {ours!r}, originally {original!r}"
        parts = [(key, ours[key], original[key]) for key in original]
    elif isinstance(original, list | tuple):
        if type(ours) is not type(original) or len(ours) != len(original):
            return f"{where} is {ours!r}, originally {original!r}"
        parts = [(i, *pair) for i, pair in enumerate(zip(ours, original, strict=True))]
    else:
        same = type(ours) is type(original) and bool(ours == original)
        return None if same else f"{where} is {ours!r}, originally {original!r}"
    found = (difference(one, other, f"{where}[{key!r}]") for key, one, other in parts)
    return next((text for text in found if text is not None), None)


def _tensors(ours: Any, original: torch.Tensor, where: str) -> str | None:
    if not isinstance(ours, torch.Tensor):
        return f"{where} is {ours!r}, originally a tensor"
    for name in ("dtype", "shape"):
        one, other = getattr(ours, name), getattr(original, name)
        if one != other:
            return f"{where} has {name} {one}, originally {other}"
    if not original.dtype.is_floating_point:
        return None if torch.equal(ours, original) else f"{where} is {ours}, originally {original}"
    one, other = ours.double(), original.double()
    close = max(TOLERANCE, 2 * torch.finfo(original.dtype).eps)  # 16 bits: the last one may differ
    if torch.allclose(one, other, rtol=close, atol=close, equal_nan=True):
        return None
    return f"{where} differs by up to {(one - other).abs().max():.2g}"
