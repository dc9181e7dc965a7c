"""A bare attention module, and tensors to call the attention function with."""

from __future__ import annotations

import torch


class Module(torch.nn.Module):
    """A causal attention module of layer 7."""

    is_causal = True
    layer_idx = 7


def states(queries: int = 3, keys: int = 3, heads: int = 2) -> tuple[torch.Tensor, ...]:
    """Query, key and value `[1, heads, tokens, 8]`."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, heads, length, 8, generator=generator) for length in (queries, keys, keys)
    )
