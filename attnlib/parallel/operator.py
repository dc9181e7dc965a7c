"""Divided layers under torch.compile: opaque operators, as `attnlib.layer.operator` has one for
`Attention`. Agreements, collectives and kernels happen inside of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnlib.cache.storage import PagedKVCache
from attnlib.compile.objects import lookup
from attnlib.layer.call import new_lse, per_head
from attnlib.layer.checks import refuse_gradients
from attnlib.parallel.metadata import ParallelMetadata
from attnlib.parallel.prefill_metadata import PrefillMetadata

if TYPE_CHECKING:
    from attnlib.parallel.attention import ParallelAttention
    from attnlib.parallel.prefill import ParallelPrefill

__all__ = ["attend_opaquely", "parallel_attend", "parallel_prefill"]

_MUTATED = ("out", "lse", "cache")


@torch.library.custom_op("attnlib::parallel_attend", mutates_args=_MUTATED)
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
    batch = lookup(metadata, ParallelMetadata, "metadata")
    found.run(query, key, value, lookup(cache, PagedKVCache, "cache"), batch, out, lse)


@torch.library.custom_op("attnlib::parallel_prefill", mutates_args=_MUTATED)
def parallel_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    layer: int,
    cache: Tensor,
    metadata: Tensor,
) -> None:
    """`ParallelPrefill.forward`; arguments and errors as of `parallel_attend`."""
    found: Any = lookup(layer, nn.Module, "layer")
    batch = lookup(metadata, PrefillMetadata, "metadata")
    found.run(query, key, value, lookup(cache, PagedKVCache, "cache"), batch, out, lse)


@parallel_attend.register_fake
@parallel_prefill.register_fake
def _(*arguments: Any) -> None:
    return None


def attend_opaquely(
    layer: ParallelAttention | ParallelPrefill,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: PagedKVCache,
    metadata: ParallelMetadata | PrefillMetadata,
    output: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The `forward` of a layer while torch.compile traces it: output per head, and LSE."""
    spec = layer.spec
    refuse_gradients(query, key, value)
    query = per_head("query", query, spec.num_heads, spec.head_size)
    if key is not None and value is not None:
        key = per_head("key", key, spec.num_kv_heads, spec.head_size)
        value = per_head("value", value, spec.num_kv_heads, spec.head_size_v)
    shape = (query.shape[0], spec.num_heads, spec.head_size_v)
    if output is None:
        output = torch.empty(shape, dtype=query.dtype, device=query.device)
    out, lse = output.view(shape), new_lse(spec, query)
    operator = parallel_attend if isinstance(metadata, ParallelMetadata) else parallel_prefill
    operator(query, key, value, out, lse, layer.handle, cache.handle, metadata.handle)
    return out, lse
