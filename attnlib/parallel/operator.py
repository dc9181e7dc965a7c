"""A divided layer under torch.compile: one opaque operator, as `attnlib.layer.operator` has for
`Attention`. Agreements, collectives and kernels happen inside of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from attnlib.cache.storage import PagedKVCache
from attnlib.compile.objects import lookup
from attnlib.layer.call import new_lse, per_head
from attnlib.layer.checks import refuse_gradients
from attnlib.parallel.metadata import ParallelMetadata

if TYPE_CHECKING:
    from attnlib.parallel.attention import ParallelAttention

__all__ = ["parallel_attend", "parallel_attend_opaquely"]


@torch.library.custom_op("attnlib::parallel_attend", mutates_args=("out", "lse", "cache"))
def parallel_attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    out: Tensor,
    lse: Tensor,
    layer: int,
    cache: Tensor,
    metadata: Tensor,
) -> None:
    """`ParallelAttention.forward`; tensors per head, and ids of the other objects.

    Raises:
        ContractError: as the method, or the object of an id no longer exists.
    """
    found: Any = lookup(layer, nn.Module, "layer")
    kept = lookup(cache, PagedKVCache, "cache")
    batch = lookup(metadata, ParallelMetadata, "metadata")
    cast("ParallelAttention", found).run(query, key, value, kept, batch, out, lse)


@parallel_attend.register_fake
def _(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    out: Tensor,
    lse: Tensor,
    layer: int,
    cache: Tensor,
    metadata: Tensor,
) -> None:
    return None


def parallel_attend_opaquely(
    layer: ParallelAttention,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: PagedKVCache,
    metadata: ParallelMetadata,
    output: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`ParallelAttention.forward` while torch.compile traces it: output per head, and LSE."""
    spec = layer.spec
    if torch.is_grad_enabled():
        refuse_gradients(query, key, value)
    query = per_head("query", query, spec.num_heads, spec.head_size)
    if key is not None and value is not None:
        key = per_head("key", key, spec.num_kv_heads, spec.head_size)
        value = per_head("value", value, spec.num_kv_heads, spec.head_size_v)
    shape = (query.shape[0], spec.num_heads, spec.head_size_v)
    if output is None:
        output = torch.empty(shape, dtype=query.dtype, device=query.device)
    out, lse = output.view(shape), new_lse(spec, query)
    handles = layer.handle, cache.handle, metadata.handle
    parallel_attend(query, key, value, out, lse, *handles)
    return out, lse
