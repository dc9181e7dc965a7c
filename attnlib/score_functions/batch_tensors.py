"""Batch tensors of one number per request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["column"]


def column(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu").reshape(-1, 1)
