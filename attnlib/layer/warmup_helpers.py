"""What a step of a warm-up runs: the calls of a batch, other kernels, and other caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from math import gcd
from typing import Any

import torch

from attnlib.cache.slots import compute_slot_mapping
from attnlib.cache.storage import PagedKVCache
from attnlib.layer.attention import Attention
from attnlib.layer.warmup_batches import extra_keys, new_batch, new_tensors
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.ops.dispatch import runs_kernels
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["form_of", "run_forms", "run_helpers", "run_over"]

_FACTOR = 16
"""The largest factor of strides (elements) and of addresses (bytes) that matters."""


def run_helpers(spec: AttentionSpec, device: torch.device) -> None:
    """Run slot mapping on the device, and `merge_states`."""
    if spec.is_paged:
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        lens, table = starts[1:], torch.zeros(1, 1, dtype=torch.int32, device=device)
        compute_slot_mapping(starts, lens, table, spec.block_size, 1)
    if spec.needs_lse:
        package = "triton" if runs_kernels(device) else "torch"
        merge = import_module(f"attnlib.ops.{package}.merge_states").merge_states
        out = torch.zeros(1, spec.num_heads, spec.head_size_v, dtype=spec.dtype, device=device)
        lse = torch.zeros(1, spec.num_heads, dtype=torch.float32, device=device)
        for merged in (None, torch.empty_like(lse)):
            merge(out, lse, out, lse, torch.empty_like(out), merged)


def run_over(
    layer: Attention,
    caches: Sequence[PagedKVCache],
    batches: Iterable[tuple[int, ...]],
    limits: BatchLimits,
    builder: AttentionMetadataBuilder[Any],
    columns: int,
) -> None:
    """Run one batch over each cache: the one with the longest prefill behind decodes.

    Args:
        layer, limits, builder: as of `warmup`.
        caches: like that of the layer.
        batches: query lengths of the warm-up.
        columns: of the block table.
    """
    if not caches:
        return
    lengths = max(batches, key=lambda one: (len(set(one)), max(one)))
    spec, device, num_tokens = layer.spec, builder.device, sum(lengths)
    common = new_batch(spec, lengths, columns, device)
    metadata = builder.build(0, common.replace(max_seq_len=limits.max_seq_len))
    rows = new_tensors(spec, num_tokens, device, True)
    extra = extra_keys(spec, metadata, num_tokens, device)
    for cache in caches:
        layer(*rows, cache, metadata, **extra)


def run_forms(
    layer: Attention,
    cache: PagedKVCache | None,
    metadata: AttentionMetadata,
    num_tokens: int,
    rows_of: Callable[[int, bool], tuple[torch.Tensor, ...]],
) -> None:
    """Run a layer over rows of a fused tensor, and over separate ones if these need other kernels.

    Args:
        layer, cache: as of `warmup`.
        metadata: of the batch.
        num_tokens: of the batch.
        rows_of: q, k and v of so many tokens, fused or not.
    """
    forms = set()
    for fused in (True, False):
        query, key, value = rows = rows_of(num_tokens, fused)
        if (form := form_of(rows)) in forms:
            continue
        forms.add(form)
        extra = extra_keys(layer.spec, metadata, num_tokens, query.device)
        for return_lse in (False, True) if layer.spec.needs_lse else (False,):
            layer(query, key, value, cache, metadata, return_lse, **extra)


def form_of(rows: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """What kernels and their choice depend on of tensors of equal shapes: the factors of their
    strides and addresses, by which Triton specializes kernels, too."""
    return tuple(
        (x.data_ptr() % _FACTOR, *((stride == 1, gcd(stride, _FACTOR)) for stride in x.stride()))
        for x in rows
    )
