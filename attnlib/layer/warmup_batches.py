"""The batches of a warm-up and the arguments of its layer calls.

Bounds are as large as the limits, but the work is small: long sequences are declared, not read, and
every slot is -1.
"""

from __future__ import annotations

from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.compressed import CompressedKeys, EntryBatch
from attnlib.ops.dispatch import runs_kernels
from attnlib.score_functions.query_tensors import QueryTensors
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec, AttentionType, MaskKind
from attnlib.workspace import BatchLimits

__all__ = [
    "extra_keys",
    "large_write",
    "long_batches",
    "new_batch",
    "new_tensors",
    "warmup_batches",
]

_LONGEST_TILE = 256
"""Longer queries use the same tiles."""

_MANY_TOKENS = 4096
"""More than the programs of a cache write that start at once on any GPU."""

_CHUNKS = (512, 4095)
"""Tokens of the shortest and the longest chunk of one request whose float8 keys Hopper copies,
which have a prefill kernel of their own (`hopper.sizes.CHUNK_TOKENS`)."""

_MOST_COLUMNS = 1 << 17
"""Of a block table. Kernels depend on the factors of two of its row stride, and not on its size."""


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
    most = min(limits.max_num_tokens, limits.max_seq_len)
    longest = min(most, _LONGEST_TILE)
    queries = sorted({*range(1, min(threshold, most) + 1), *_powers(longest)})
    found: list[tuple[int, ...]] = []
    for query in queries:
        for reqs in _powers(limits.max_num_reqs):
            if query <= threshold or reqs <= 2:
                found.append(_decodes(reqs, query, limits.max_num_tokens))
            if query in _powers(min(threshold, most)):
                # Programs do not share them evenly: they have splits.
                found.append(_decodes(reqs - 1, query, limits.max_num_tokens))
    # The number of leading decodes determines the alignment of the arrays of the prefill part, and
    # they have tiles of their own beside it. The rows of the shortest prefill may be those of no
    # power of two.
    room = limits.max_num_tokens - threshold - 1
    for decodes in sorted({*range(5), *_powers(limits.max_num_reqs - 1)}):
        for query in _powers(threshold):
            found.append((*_decodes(decodes, query, room), threshold + 1))
        if decodes < 5 and longest - decodes > threshold:
            found.append((1,) * decodes + (longest - decodes,))
    return _within(limits, found)


def _within(limits: BatchLimits, lengths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The different batches among these that are within the limits."""
    return [
        one
        for one in dict.fromkeys(lengths)
        if 0 < len(one) <= limits.max_num_reqs
        and sum(one) <= limits.max_num_tokens
        and max(one) <= limits.max_seq_len
    ]


def _decodes(reqs: int, query: int, room: int) -> tuple[int, ...]:
    """Query lengths of requests, of which one has `query` tokens, and all if `room` holds them."""
    if reqs * query <= room:
        return (query,) * reqs
    return (1,) * (reqs - 1) + (query,)


def large_write(limits: BatchLimits) -> tuple[int, ...]:
    """A batch of many new tokens: on Hopper its cache write is a kernel of its own."""
    tokens = min(limits.max_num_tokens, _MANY_TOKENS)
    query = min(tokens, limits.max_seq_len)
    return (query,) * min(limits.max_num_reqs, tokens // query)


def long_batches(
    spec: AttentionSpec, limits: BatchLimits, decode_threshold: int | None = None
) -> list[tuple[int, ...]]:
    """Query lengths of the batches of more than `_LONGEST_TILE` tokens that have other kernels;
    arguments as of `warmup_batches`."""
    found, most = [large_write(limits)], min(limits.max_num_tokens, limits.max_seq_len)
    if spec.kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and most >= _CHUNKS[0]:
        found += [(min(tokens, most),) for tokens in _CHUNKS]
    # Long prefills leave few programs for the decodes beside them, and are not copied.
    threshold = decode_threshold or 1
    for query in _powers(threshold):
        for reqs in _powers(limits.max_num_reqs - 1):
            decodes = _decodes(reqs, query, limits.max_num_tokens - threshold - 1)
            prefill = min(_CHUNKS[1], most, limits.max_num_tokens - sum(decodes))
            if prefill > threshold:
                found.append((*decodes, prefill))
    return _within(limits, found)


def _powers(limit: int) -> list[int]:
    powers = [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]
    return powers if limit in powers else [*powers, limit]


def new_batch(
    spec: AttentionSpec, lengths: tuple[int, ...], columns: int, device: torch.device
) -> CommonAttentionMetadata:
    """A batch of sequences that begin; no slot is written. Splits depend on the declared bound on
    sequence lengths, which copies of the batch may have as large as they like."""
    score, causal = _score_tensors(spec, len(lengths), device), None
    if spec.mask_kind is MaskKind.PER_REQUEST:
        causal = torch.ones(len(lengths), dtype=torch.bool, device=device)
    if not spec.is_paged:
        return CommonAttentionMetadata.from_lengths(
            lengths, lengths, device=device, score_tensors=score, causal=causal
        )
    if columns > _MOST_COLUMNS:
        columns = _MOST_COLUMNS + columns % 256
    is_cross = spec.attn_type is AttentionType.ENCODER_DECODER
    blocks = max(columns, -(-max(lengths) // spec.block_size))
    table = torch.zeros(len(lengths), blocks, dtype=torch.int32, device="cpu")
    common = CommonAttentionMetadata.from_lengths(
        lengths,
        lengths,
        table,
        spec.block_size,
        device,
        score_tensors=score,
        causal=causal,
        is_cross_attention=is_cross,
        new_key_lens=lengths if is_cross else None,
    )
    assert common.slot_mapping is not None  # a block table was given
    common.slot_mapping.fill_(-1)
    return common


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


def extra_keys(
    spec: AttentionSpec, metadata: AttentionMetadata, num_tokens: int, device: torch.device
) -> dict[str, Any]:
    """The arguments of a call besides keys and values: selected keys, compressed entries or tensors
    of query tokens."""
    if spec.has_query_tensors:
        return {"query_tensors": _query_tensors(spec, num_tokens, device)}
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
        max(1, (metadata.facts.max_seq_len or 0) // entries.compress_rate),
    )
    with_lists = plain.replace(key_selection=entries.selection)
    selected = _selected_keys(with_lists, metadata, num_tokens, device)
    return {"compressed_keys": CompressedKeys(cache, batch, selected)}


def _query_tensors(spec: AttentionSpec, num_tokens: int, device: torch.device) -> QueryTensors:
    """Zeros; kernels do not depend on the width of query tensors, and take those of the model's
    dtype."""
    names = () if spec.score_function is None else spec.score_function.query_tensors
    tensors = {name: torch.zeros(num_tokens, 1, dtype=spec.dtype, device=device) for name in names}
    shape = (num_tokens, spec.num_heads)
    sinks = torch.zeros(shape, dtype=spec.dtype, device=device) if spec.token_sinks else None
    return QueryTensors(tensors, sinks)


def _selected_keys(
    spec: AttentionSpec, metadata: AttentionMetadata, num_tokens: int, device: torch.device
) -> SelectedKeys | None:
    """Full lists that select the first block; None for layers without a key selection."""
    selection = spec.key_selection
    if selection is None:
        return None
    heads = selection.num_lists_heads(spec.num_heads, spec.num_kv_heads)
    indices = torch.full((num_tokens, heads, selection.max_blocks), -1, device=device)
    indices[..., 0] = 0
    # A request has at least as many query tokens as lists.
    starts = metadata.facts.query_start_loc if selection.query_block_size > 1 else None
    return SelectedKeys(indices.int(), starts)


def new_tensors(
    spec: AttentionSpec, num_tokens: int, device: torch.device, fused: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as separate tensors, or as views of one fused QKV projection (P9)."""
    sizes = (
        spec.num_heads * spec.head_size,
        spec.num_kv_heads * spec.head_size,
        spec.num_kv_heads * spec.head_size_v,
    )
    # Memory of a described GPU is that of the CPU, and no kernel reads it.
    new = torch.empty if device.type == "cpu" and runs_kernels(device) else torch.zeros
    if fused:
        rows = new(num_tokens, sum(sizes), dtype=spec.dtype, device=device)
        query, key, value = torch.split(rows, list(sizes), dim=1)
    else:
        query, key, value = (
            new(num_tokens, size, dtype=spec.dtype, device=device) for size in sizes
        )
    return query, key, value
