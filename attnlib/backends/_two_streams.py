"""Attention to a layer's own keys and to compressed entries under one softmax (M17).

The two parts are computed by the kernels of the backend and merged by their LSEs. Only the part of
the layer's own keys has the sink, so that it counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attnlib.backends.base import AttentionImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.compressed import CompressedKeys
from attnlib.ops.params import AttentionParams

__all__ = ["EntryOperations", "attend_two_streams"]


class EntryOperations(NamedTuple):
    """The operations of a backend, with the signatures of `ops.torch`."""

    paged_decode: Callable[..., Any]
    selected_attention: Callable[..., Any]
    merge_states: Callable[..., Any]


def attend_two_streams(
    impl: AttentionImpl,
    operations: EntryOperations,
    query: torch.Tensor,
    cache: PagedKVCache,
    metadata: AttentionMetadata,
    compressed: CompressedKeys,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    kernels: str = "auto",
) -> None:
    """See `AttentionImpl.forward_compressed`.

    Args:
        impl: of the layer; its `forward` attends to the layer's own keys.
        operations: those that attend to the entries.
        query, cache, metadata, compressed, output, lse: of the call.
        kernels: the configured kernels of the backend.
    """
    spec, batch, entries = impl.spec, compressed.batch, compressed.cache
    assert spec.compressed_entries is not None  # the layer checks the call
    if lse is None:
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    impl.forward(query, cache, metadata, output, lse)
    if batch.max_entries == 0 or query.shape[0] == 0:
        return
    params = AttentionParams(
        scale=impl.scale,
        causal=False,  # `num_entries` bounds what a query sees
        logits_soft_cap=spec.logits_soft_cap or 0.0,
        k_scale=entries.k_scale,
        v_scale=entries.v_scale,
    )
    part = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    part_lse = torch.empty_like(lse)
    caches = (entries.key_cache, entries.value_cache, batch.block_table)
    inputs = (query, *caches, batch.query_start_loc, batch.num_entries, params)
    results = {"out": part, "lse": part_lse, "kernels": kernels}
    if compressed.selected is None:
        bounds = {"max_query_len": 1, "max_seq_len": batch.max_entries}
        operations.paged_decode(*inputs, **bounds, **results)
    else:
        lists = (spec.compressed_entries.selection, compressed.selected)
        operations.selected_attention(*inputs, *lists, **results)
    operations.merge_states(output, lse, part, part_lse, output, lse)
