"""Compile and plan before the first request: run one batch of every class within declared limits.

Compiled kernels depend on a few classes of shapes and not on lengths: the rows that share a tile
(the longest query), whether keys are split (the number of requests and the bound on sequence
lengths), whether a batch mixes decodes with prefills and where it is split, whether the LSE is
returned, and the strides of q, k and v. `warmup` runs all classes. Bounds are as large as the
limits, but the work is small: long sequences are declared, not read. It runs on the cache of the
caller, because its strides matter too, and does not change it: every slot is -1.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from attnlib.cache.slots import compute_slot_mapping
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.compressed import CompressedKeys, EntryBatch
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["WarmupReport", "warmup", "warmup_batches"]

_LONGEST_TILE = 256
"""Longer queries use the same tiles."""

_MANY_TOKENS = 4096
"""More than the programs of a cache write that start at once on any GPU."""


@dataclass(frozen=True)
class WarmupReport:
    """The result of `warmup`.

    Attributes:
        batches: query lengths of each batch, in order.
        seconds: duration.
    """

    batches: tuple[tuple[int, ...], ...]
    seconds: float

    def __str__(self) -> str:
        return f"warmed up with {len(self.batches)} batches in {self.seconds:.1f} s"


def warmup(
    layer: Attention,
    cache: PagedKVCache | None,
    limits: BatchLimits,
    *,
    builder: AttentionMetadataBuilder[Any] | None = None,
    max_blocks: int | None = None,
    device: torch.device | str | None = None,
) -> WarmupReport:
    """Run every class of batch within `limits` on one layer.

    Layers with the same spec and a cache of the same strides need no further warmup.

    Args:
        layer: the layer.
        cache: the cache of the layer, which is not changed; None for encoders.
        limits: the largest batch.
        builder: the metadata builder that will be used, so that its workspace and plans are warmed
            up too; None creates one with `limits`.
        max_blocks: columns of the block table that will be used; None for as many as
            `limits.max_seq_len` needs.
        device: device of a layer without a cache.

    Returns:
        The batches that were run.

    Raises:
        ContractError: a paged layer without a cache.
    """
    spec = layer.spec
    if spec.is_paged and cache is None:
        raise ContractError(
            f"warmup of a layer with attn_type={spec.attn_type.value} needs its cache: kernels "
            f"depend on its strides"
        )
    where = (
        cache.device if cache is not None else torch.device(device or torch.get_default_device())
    )
    builder = builder or layer.backend.make_builder(spec, where, limits=limits)
    started, batches = time.perf_counter(), warmup_batches(limits, builder.reorder_batch_threshold)
    if where.type == "cuda" and spec.is_paged:
        batches = list(dict.fromkeys([*batches, _large_write(limits)]))
    columns = max_blocks or -(-limits.max_seq_len // spec.block_size)
    with torch.no_grad():
        for lengths in batches:
            bounds = builder.seq_len_bounds(
                len(lengths), max(lengths), max(limits.max_seq_len, *lengths)
            )
            for common in _commons(spec, lengths, bounds, columns, where):
                _run(layer, cache, builder.build(0, common), sum(lengths), where)
        for metadata, num_tokens in builder.warmup_metadata(limits):
            _run(layer, cache, metadata, num_tokens, where)
        _warm_helpers(spec, where)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return WarmupReport(tuple(batches), time.perf_counter() - started)


def warmup_batches(
    limits: BatchLimits, decode_threshold: int | None = None
) -> list[tuple[int, ...]]:
    """Query lengths of the batches to run: every class of shapes within the limits.

    Args:
        limits: the largest batch.
        decode_threshold: largest number of new tokens of a decode; None if the builder does not
            distinguish decodes.
    """
    threshold = decode_threshold or 1
    queries = sorted(
        {
            *range(1, min(threshold, limits.max_num_tokens) + 1),
            *_powers(min(limits.max_num_tokens, _LONGEST_TILE)),
        }
    )
    found: dict[tuple[int, ...], None] = {}
    for query in queries:
        for reqs in _powers(limits.max_num_reqs):
            if reqs * query <= limits.max_num_tokens and (query <= threshold or reqs <= 2):
                found[(query,) * reqs] = None
    # The number of leading decodes determines the alignment of the arrays of the prefill part.
    for decodes in range(1, 5):
        for query in (threshold + 1, min(limits.max_num_tokens, _LONGEST_TILE) - decodes):
            if (
                query > threshold
                and decodes + query <= limits.max_num_tokens
                and decodes + 1 <= limits.max_num_reqs
            ):
                found[(1,) * decodes + (query,)] = None
    return list(found)


def _large_write(limits: BatchLimits) -> tuple[int, ...]:
    """A batch of many new tokens: on Hopper its cache write is a kernel of its own."""
    tokens = min(limits.max_num_tokens, _MANY_TOKENS)
    query = min(tokens, limits.max_seq_len)
    return (query,) * min(limits.max_num_reqs, tokens // query)


def _powers(limit: int) -> list[int]:
    powers = [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]
    return powers if limit in powers else [*powers, limit]


def _commons(
    spec: AttentionSpec,
    lengths: tuple[int, ...],
    bounds: list[int],
    columns: int,
    device: torch.device,
) -> Iterator[CommonAttentionMetadata]:
    """The batch with each bound on sequence lengths (splits depend on it); no slot is written."""
    score = _score_tensors(spec, len(lengths), device)
    for bound in bounds:
        if not spec.is_paged:
            yield CommonAttentionMetadata.from_lengths(
                lengths, lengths, device=device, max_seq_len=bound, score_tensors=score
            )
            continue
        table = torch.zeros(
            len(lengths), max(columns, -(-max(lengths) // spec.block_size)), dtype=torch.int32
        )
        common = CommonAttentionMetadata.from_lengths(
            lengths,
            lengths,
            table,
            spec.block_size,
            device,
            max_seq_len=bound,
            score_tensors=score,
        )
        assert common.slot_mapping is not None  # a block table was given
        common.slot_mapping.fill_(-1)
        yield common


def _score_tensors(
    spec: AttentionSpec, num_reqs: int, device: torch.device
) -> dict[str, torch.Tensor] | None:
    """Batch tensors of the score function; kernels do not depend on their width."""
    function = spec.score_function
    if function is None or not function.batch_tensors:
        return None
    return {
        name: torch.zeros(num_reqs, 1, dtype=torch.int32, device=device)
        for name in function.batch_tensors
    }


def _run(
    layer: Attention,
    cache: PagedKVCache | None,
    metadata: Any,
    num_tokens: int,
    device: torch.device,
) -> None:
    extra = _extra_keys(layer.spec, metadata, num_tokens, device)
    for fused in (True, False):
        query, key, value = _inputs(layer.spec, num_tokens, device, fused)
        for return_lse in (False, True) if layer.spec.needs_lse else (False,):
            layer(query, key, value, cache, metadata, return_lse, **extra)


def _extra_keys(
    spec: AttentionSpec, metadata: Any, num_tokens: int, device: torch.device
) -> dict[str, Any]:
    """The arguments of a call besides keys and values: selected keys or compressed entries."""
    entries = spec.compressed_entries
    if entries is None:
        selected = _selected_keys(spec, metadata, num_tokens, device)
        return {} if selected is None else {"selected_keys": selected}
    plain = spec.replace(compressed_entries=None, block_size=entries.block_size)
    cache = PagedKVCache.allocate(plain, 1, device)
    for part in (cache.key_cache, cache.value_cache):
        part.zero_()
    batch = EntryBatch(
        entries.compress_rate,
        torch.arange(num_tokens + 1, dtype=torch.int32, device=device),
        torch.ones(num_tokens, dtype=torch.int32, device=device),
        torch.zeros(num_tokens, 1, dtype=torch.int32, device=device),
        max(1, metadata.max_seq_len // entries.compress_rate),
    )
    with_lists = plain.replace(key_selection=entries.selection)
    selected = _selected_keys(with_lists, metadata, num_tokens, device)
    return {"compressed_keys": CompressedKeys(cache, batch, selected)}


def _selected_keys(
    spec: AttentionSpec, metadata: Any, num_tokens: int, device: torch.device
) -> SelectedKeys | None:
    """Full lists that select the first block; None for layers without a key selection."""
    selection = spec.key_selection
    if selection is None:
        return None
    heads = selection.num_lists_heads(spec.num_heads, spec.num_kv_heads)
    indices = torch.full((num_tokens, heads, selection.max_blocks), -1, device=device)
    indices[..., 0] = 0
    # A request has at least as many query tokens as lists.
    starts = metadata.query_start_loc if selection.query_block_size > 1 else None
    return SelectedKeys(indices.int(), starts)


def _inputs(
    spec: AttentionSpec, num_tokens: int, device: torch.device, fused: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as separate tensors, or as views of one fused QKV projection (P9)."""
    sizes = (
        spec.num_heads * spec.head_size,
        spec.num_kv_heads * spec.head_size,
        spec.num_kv_heads * spec.head_size_v,
    )
    if fused:
        query, key, value = torch.split(
            torch.zeros(num_tokens, sum(sizes), dtype=spec.dtype, device=device), list(sizes), dim=1
        )
    else:
        query, key, value = (
            torch.zeros(num_tokens, size, dtype=spec.dtype, device=device) for size in sizes
        )
    return query, key, value


def _warm_helpers(spec: AttentionSpec, device: torch.device) -> None:
    """Run the kernels outside of attention: slot mapping on the device, and `merge_states`."""
    if spec.is_paged:
        starts, lens = (
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
        )
        compute_slot_mapping(
            starts, lens, torch.zeros(1, 1, dtype=torch.int32, device=device), spec.block_size, 1
        )
    if spec.needs_lse:
        merge = import_module(
            f"attnlib.ops.{'triton' if device.type == 'cuda' else 'torch'}.merge_states"
        ).merge_states
        out = torch.zeros(1, spec.num_heads, spec.head_size_v, dtype=spec.dtype, device=device)
        lse = torch.zeros(1, spec.num_heads, dtype=torch.float32, device=device)
        for merged in (None, torch.empty_like(lse)):
            merge(out, lse, out, lse, torch.empty_like(out), merged)
