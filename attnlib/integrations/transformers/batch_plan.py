"""The metadata of a step for one backend, and layer calls over it in the shapes of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.graph_backends import graphs_record
from attnlib.integrations.transformers.layers import is_transient
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
    """`[B, H, T, D]` as `[B * T, H, D]`, or the rows at `indices` of it. Layers require that the
    last stride is 1, which is not so for heads of channels (Florence 2)."""
    if states.shape[2] == 1:  # one operation instead of two
        rows = states.select(2, 0)
    else:
        rows = states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    return rows if indices is None else rows.index_select(0, indices)


def run_layer(
    layer: Attention,
    plan: BatchPlan,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: Any,
    **extra: Any,
) -> torch.Tensor:
    """Run a layer over the batch of a plan.

    Args:
        layer, plan: the layer and its batch.
        query: `[B, Hq, T, D]`.
        key, value: packed keys and values of the new tokens, or None.
        cache: the layer's cache, or None.
        extra: `selected_keys`, `compressed_keys` or `query_tensors` of the layer.

    Returns:
        `[B, T, Hq, Dv]`; queries that are not in the batch are 0.
    """
    if is_transient():
        _check_that_graphs_record(layer)
    batch, heads, queries, _ = query.shape
    packed = pack(query, plan.queries)
    out: torch.Tensor = layer(packed, key, value, cache, plan.metadata, **extra)
    if plan.queries is not None:
        whole = out.new_zeros(batch * queries, *out.shape[1:])
        out = whole.index_copy_(0, plan.queries, out)
    return out.view(batch, queries, heads, layer.spec.head_size_v)


def _check_that_graphs_record(layer: Attention) -> None:
    """Refuse a backend that a CUDA graph cannot record.

    Raises:
        UnsupportedConfigError: names the backend and the alternatives.
    """
    name = layer.backend.get_name()
    if not graphs_record(layer.backend):
        raise UnsupportedConfigError(
            f"{layer.prefix}: a CUDA graph records this call, which backend {name} does not "
            f"support: compile with mode='default', or choose another backend",
            backend=name,
        )
