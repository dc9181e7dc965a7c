"""Compile the kernels of divided layers before the first request."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.layer.warmup import warmup
from attnlib.ops.addresses import as_count
from attnlib.ops.dispatch import operation
from attnlib.ops.split_states import SplitStates
from attnlib.parallel.attention import ParallelAttention
from attnlib.parallel.between import leaves_splits
from attnlib.parallel.builder import ParallelBuilder
from attnlib.parallel.merge import MergeRows, Parts
from attnlib.parallel.prefill import ParallelPrefill
from attnlib.parallel.rows import limits_of_rows
from attnlib.parallel.staging import Staging
from attnlib.workspace import BatchLimits

__all__ = ["warmup_parallel"]

_TOKENS = (1, 2048)
"""Tokens of merges: a launch of few programs overlaps the kernel before it, one of many does
not."""


def warmup_parallel(
    layer: ParallelAttention | ParallelPrefill,
    cache: PagedKVCache,
    limits: BatchLimits,
    *,
    builder: ParallelBuilder | None = None,
    max_blocks: int | None = None,
) -> None:
    """Run every class of batch within limits on all parts of a layer, and the merge. All ranks call
    this together where they exchange by memory.

    Args:
        layer: the layer, of decodes or of divided prefills.
        cache: its cache, which is not changed.
        limits: the largest batch.
        builder: of the batches; None creates one. Not read for prefills.
        max_blocks: columns of the block table; None for as many as `limits.max_seq_len` needs.

    Raises:
        ContractError: an argument of another type; on this rank.
    """
    for name, given, kind in (
        ("layer", layer, ParallelAttention | ParallelPrefill),
        ("cache", cache, PagedKVCache),
        ("limits", limits, BatchLimits),
        ("builder", builder, ParallelBuilder | None),
    ):
        if not isinstance(given, kind):
            raise ContractError(
                f"{name} is a {type(given).__name__}; warmup_parallel takes a ParallelAttention or "
                "ParallelPrefill, its PagedKVCache, BatchLimits, and a ParallelBuilder or None",
                rule="X8",
            )
    if max_blocks is not None:
        max_blocks = as_count("max_blocks", max_blocks, 1)
    if isinstance(layer, ParallelPrefill):
        _warm_up_prefill(layer, cache, limits)
        return
    builder = layer.make_builder(limits) if builder is None else builder
    rows = limits_of_rows(limits, by_row=layer.context is None)
    assert rows is not None
    warmup(layer.cached, cache, rows, builder=builder.cached, max_blocks=max_blocks)
    if layer.context is not None and layer.context is not layer.cached:
        warmup(layer.context, cache, limits, builder=builder.context, max_blocks=max_blocks)
    if layer.new is not None:
        scratch = Staging(layer.new.spec, cache.device)
        scratch.reserve(1)
        warmup(layer.new, scratch.like(cache), limits, builder=builder.new)
    spec, world_size = layer.spec, layer.group.world_size
    for tokens in _TOKENS:
        shape = torch.Size((world_size, tokens, spec.num_heads, spec.head_size_v))
        out = torch.zeros(shape[1:], dtype=spec.dtype, device=cache.device)
        lse = out.new_zeros(out.shape[:2], dtype=torch.float32)
        parts = Parts.like(shape, out, has_sink=spec.has_sink)
        parts.rows.zero_()
        MergeRows.of(world_size, tokens, spec.has_sink, out.device).merge(parts, out, lse)
    for tokens in layer.exchange.by_memory(limits.max_num_tokens):
        _exchange(layer, tokens, cache.device)


def _exchange(layer: ParallelAttention, tokens: int, device: torch.device) -> None:
    """An exchange of zeros."""
    spec = layer.spec
    query = torch.zeros(tokens, spec.num_heads, spec.head_size, dtype=spec.dtype, device=device)
    heads = layer.exchange.gather_heads(query).shape[1]
    sent = query.new_zeros(tokens, heads, spec.head_size_v), query.new_zeros(tokens, heads).float()
    merged = query.new_empty(tokens, spec.num_heads, spec.head_size_v)
    lse = sent[1].new_empty(tokens, spec.num_heads)
    rows = MergeRows.of(layer.group.world_size, tokens, spec.has_sink, device)
    state = *sent, rows, merged, lse, layer.sinks
    layer.exchange.combine(*state, has_state=False)
    if tokens == 1 and leaves_splits(layer.cached.impl):  # of small batches only
        layer.exchange.gather_heads(query)
        splits = SplitStates.of(tokens, spec.num_kv_heads, device)
        layer.exchange.combine(*state, has_state=False, splits=splits)


def _warm_up_prefill(layer: ParallelPrefill, cache: PagedKVCache, limits: BatchLimits) -> None:
    """The layers over the scratch cache, and the merge of two steps of a ring."""
    scratch = Staging(layer.causal.spec, cache.device)
    scratch.reserve(1)
    limits = replace(limits, max_num_reqs=2 * limits.max_num_reqs)  # two runs of each prompt
    warmup(layer.causal, scratch.like(cache), limits)
    if layer.cross is None:
        return
    warmup(layer.cross, scratch.like(cache), limits)
    spec = layer.spec
    for tokens in _TOKENS:
        shape = (tokens, spec.num_heads, spec.head_size_v)
        part = torch.zeros(shape, dtype=spec.dtype, device=cache.device)
        state, lse = layer.first_state(part), part.new_zeros(shape[:2], dtype=torch.float32)
        operation("merge_states", "merge_states", part)(state, lse, part, lse, state, lse)
