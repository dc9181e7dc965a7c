"""Compile the kernels of expanded prefills before the first request."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.mla.latent_attention import LatentAttention
from attnlib.workspace import BatchLimits

__all__ = ["warm_up_expanded"]


def warm_up_expanded(
    layer: LatentAttention,
    cache: PagedKVCache,
    limits: BatchLimits,
    builder: AttentionMetadataBuilder[Any] | None = None,
) -> None:
    """Run prefills in the expanded form, without and with context, over the first block of the
    cache. Nothing is written.

    Args:
        layer: the layer.
        cache: of the layer.
        limits: the largest batch; if no prefill within it is expanded, nothing is run.
        builder: the builder of the batches' metadata; None creates one.
    """
    spec, query_len = layer.spec, layer.expand_from
    if query_len is None or query_len > min(limits.max_num_tokens, limits.max_seq_len):
        return
    builder = builder or layer.layer.backend.make_builder(spec, cache.device, limits=limits)
    rotary, device = spec.head_size - spec.head_size_v, cache.device
    longer = [query_len << power for power in range(3)]
    counts = range(1, min(2, limits.max_num_reqs) + 1)
    for count, query_len in itertools.product(counts, longer):
        tokens = count * query_len
        for context in (0, spec.block_size):
            if tokens > limits.max_num_tokens or context + query_len > limits.max_seq_len:
                continue
            table = torch.zeros(count, -(-(context + query_len) // spec.block_size)).int()
            lengths = [query_len] * count, [context + query_len] * count
            common = CommonAttentionMetadata.from_lengths(*lengths, table, spec.block_size, device)
            common.slot_mapping = None
            query, latent = (
                torch.zeros(tokens, *shape, dtype=spec.dtype, device=device)
                for shape in ((spec.num_heads, layer.key_size + rotary), (spec.head_size,))
            )
            with torch.no_grad():
                layer(query, latent, cache, builder.build(0, common))
