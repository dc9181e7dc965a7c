"""Dtypes of queries, keys and values under `torch.autocast`."""

from __future__ import annotations

import torch

__all__ = ["as_eager_casts"]


def as_eager_casts(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in the dtype that eager attention computes its products in.

    Under autocast, projections return 16 bits, and rotary embeddings make float32 of queries and
    keys again. Eager attention multiplies them in the dtype of autocast; kernels need one dtype.
    """
    kind = states[0].device.type
    if not torch.is_autocast_enabled(kind):
        return states
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in states)
