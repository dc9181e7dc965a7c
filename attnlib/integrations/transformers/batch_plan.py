"""The metadata of a step for one backend, and layer calls over it in the shapes of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlib.integrations.transformers.layers import Call
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadata

__all__ = ["BatchPlan", "pack", "run_layer"]


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Metadata of a step for one backend and spec.

    Attributes:
        metadata: what the metadata builder returned.
        queries: indices of the real queries among the B * T; None for all.
    """

    metadata: AttentionMetadata
    queries: torch.Tensor | None


def pack(states: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    """`[B, H, T, D]` as `[B * T, H, D]`, or the rows at `indices` of it."""
    rows = states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])
    return rows if indices is None else rows.index_select(0, indices)


def run_layer(
    layer: Attention,
    plan: BatchPlan,
    call: Call,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: Any,
    **extra: Any,
) -> torch.Tensor:
    """Run a layer over the batch of a plan.

    Args:
        layer, plan, call: the layer, its batch and the attention call.
        key, value: packed keys and values of the new tokens, or None.
        cache: the layer's cache, or None.
        extra: `selected_keys` or `compressed_keys` of the layer.

    Returns:
        `[B, T, Hq, Dv]`; queries that are not in the batch are 0.
    """
    batch, heads, queries, _ = call.query.shape
    packed = pack(call.query, plan.queries)
    out: torch.Tensor = layer(packed, key, value, cache, plan.metadata, **extra)
    if plan.queries is not None:
        whole = out.new_zeros(batch * queries, *out.shape[1:])
        out = whole.index_copy_(0, plan.queries, out)
    return out.view(batch, queries, heads, layer.spec.head_size_v)
