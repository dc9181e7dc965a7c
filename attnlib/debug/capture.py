"""Copies of attention calls with the cache blocks that they use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.debug.recorded_case import case_of
from attnlib.debug.recorded_fields import score_fields
from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadata
from attnlib.ops.block_moves import move_blocks
from attnlib.spec import AttentionSpec
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.block_placement import BlockPlacement
from attnlib.testing.case import Case
from attnlib.testing.inputs import StepInputs
from attnlib.testing.layouts import CacheViews, allocate_views
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.oracle import OracleParams
from attnlib.testing.score_functions import oracle_score
from attnlib.testing.tensor_io import (
    pack_cache_views,
    pack_tensor,
    unpack_cache_views,
    unpack_tensor,
)

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["capture_call", "capture_layer_call"]


def capture_call(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_tensors: Mapping[str, torch.Tensor] | None = None,
    kv_written: bool = True,
) -> MaterializedCase:
    """Copy a call and the cache blocks that it uses.

    Args:
        spec: the layer's spec.
        query: [T, Hq, D].
        key: [T, Hkv, D], or None if the layer does not write the cache.
        value: [T, Hkv, Dv], or None with `key`.
        cache: the layer's cache.
        metadata: metadata with the attributes query_start_loc, seq_lens and block_table, and
            optionally causal, query_bias and score_tensors.
        scale: softmax scale.
        alibi_slopes, sinks: [Hq] float32, or None.
        score_tensors: the layer tensors of the score function by name, or None.
        kv_written: the cache already holds this step's keys and values.

    Raises:
        ContractError: the metadata does not have the required attributes, the layer has selected
            keys, compressed entries or tensors of query tokens, or its score function is defined in
            `__main__`, which no other process can import.
    """
    if spec.takes_extra:
        raise ContractError(
            "a call with selected keys, compressed entries or tensors of query tokens cannot be "
            "recorded, because recordings hold none of these: compare two backends in a test "
            "instead"
        )
    facts, tensors, score = metadata.facts, None, None
    if spec.score_function is not None:
        score_fields(spec.score_function)  # refuses what a file cannot describe
        both = {**(score_tensors or {}), **(facts.score_tensors or {})}
        tensors = {name: tensor.detach().clone() for name, tensor in both.items()}
        score = oracle_score(spec.score_function, tensors, query.device)
    inputs = _inputs(spec, query, key, value, cache, metadata, kv_written)
    case = case_of(spec, inputs.batch)
    params = replace(
        _oracle_params(spec, case, query.device),
        scale=scale,
        causal=spec.is_causal if facts.causal is None else facts.causal,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        query_bias=facts.query_bias,
        k_scale=inputs.cache.scales[0] if inputs.cache.scales else cache.k_scale,
        v_scale=inputs.cache.scales[1] if inputs.cache.scales else cache.v_scale,
        score=score,
    )
    return MaterializedCase(case, spec, inputs, params, tensors)


def _oracle_params(spec: AttentionSpec, case: Case, device: torch.device) -> OracleParams:
    """Those of the case, with the window of the layer: it holds in a batch that is not causal,
    too."""
    left, right = spec.visible_window
    window = (-1 if left is None else left, -1 if right is None else right)
    return replace(case.oracle_params(device), window=window)


def _inputs(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache,
    metadata: AttentionMetadata,
    kv_written: bool,
) -> StepInputs:
    """The tensors of the call, and of its batch over the copied blocks."""
    starts, query_lens, seq_lens, table = _lengths(metadata)
    batch = BatchSpec(tuple(query_lens), tuple(seq_lens), max(query.shape[0] - sum(query_lens), 0))
    placement, used_blocks = _renumber_blocks(table, seq_lens, cache.block_size)
    case, device, kv_heads = case_of(spec, batch), query.device, spec.num_kv_heads
    if key is None or value is None:  # stand-ins that nobody writes
        new_key = query[:, :kv_heads]
        new_value = query[:, :kv_heads, : spec.head_size_v]
    else:
        new_key, new_value = key, value
    slots = _slots(batch, placement, cache.block_size, writes=key is not None)
    return StepInputs(
        batch=batch,
        dims=case.dimensions,
        placement=placement,
        seed=0,
        kv_written=kv_written,
        query=unpack_tensor(pack_tensor(query), device),
        key=unpack_tensor(pack_tensor(new_key), device),
        value=unpack_tensor(pack_tensor(new_value), device),
        out=query.new_full((query.shape[0], spec.num_heads, spec.head_size_v), float("nan")),
        cache=_copied_blocks(case, used_blocks, cache, device),
        block_table=placement.block_table.to(device),
        query_start_loc=starts.clone(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
    )


def _slots(
    batch: BatchSpec, placement: BlockPlacement, block_size: int, *, writes: bool
) -> list[int]:
    """The slot of each row in the copied blocks."""
    slots = [
        slot
        for r, (q, s) in enumerate(batch.lengths)
        for slot in ([-1] * max(q - s, 0) + placement.slots(r, max(s - q, 0), s, block_size))
    ]
    if not writes:  # requests may share the blocks of their last tokens
        slots = [-1] * len(slots)
    return [*slots, *[-1] * batch.padding_tokens]


def capture_layer_call(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache,
    metadata: AttentionMetadata,
    *,
    needs_lse: bool,
) -> MaterializedCase:
    """Copy a completed call of an `Attention` layer with its scale, slopes, sinks, score tensors.

    Args:
        layer, query, key, value, cache, metadata: as an observer of `attnlib.instrumentation`
            gets them.
        needs_lse: whether the call returned the LSE.

    Raises:
        ContractError: as `capture_call`.
    """
    spec, impl = layer.spec.replace(needs_lse=needs_lse), layer.impl
    names = () if spec.score_function is None else spec.score_function.layer_tensors
    return capture_call(
        spec,
        query,
        key,
        value,
        cache,
        metadata,
        scale=impl.scale,
        alibi_slopes=impl.alibi_slopes,
        sinks=impl.sinks,
        score_tensors=dict(zip(names, impl.layer_score_tensors, strict=True)),
    )


def _lengths(
    metadata: AttentionMetadata,
) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor]:
    """Starts of the queries, query lengths, sequence lengths and the block table."""
    facts = metadata.facts
    starts, seq_lens, table = facts.query_start_loc, facts.seq_lens, facts.block_table
    if starts is None or seq_lens is None or table is None:
        raise ContractError(
            f"{type(metadata).__name__} does not have query_start_loc, seq_lens and block_table: a "
            "call can only be recorded if the backend's metadata has these attributes"
        )
    begin = starts.tolist()
    query_lens = [b - a for a, b in zip(begin, begin[1:], strict=False)]
    return starts, query_lens, seq_lens.tolist(), table.cpu()


def _copied_blocks(
    case: Case, used: list[int], cache: PagedKVCache, device: torch.device
) -> CacheViews:
    """Some blocks of a cache: with their strides, or pages that hold their scales."""
    blocks = torch.tensor(used, dtype=torch.long, device=cache.device)
    if cache.page_format is None:
        packed = pack_cache_views(cache.key_cache, cache.value_cache, blocks)
        return CacheViews(*unpack_cache_views(packed, device), (), "NHD")
    copied = allocate_views(case.dimensions, max(1, len(blocks)), case.layout, device)
    assert copied.scales is not None  # a format with scales in the page
    scales = (scale for scale in copied.scales if isinstance(scale, torch.Tensor))
    views = (copied.key, copied.value, *scales)
    move_blocks(cache.block_views, views, blocks.tolist(), list(range(len(blocks))))
    return copied


def _renumber_blocks(
    table: torch.Tensor, seq_lens: list[int], block_size: int
) -> tuple[BlockPlacement, list[int]]:
    """A placement over the used blocks, numbered from 0, and their ids in the pool."""
    rows = [table[r, : -(-seq_len // block_size)].tolist() for r, seq_len in enumerate(seq_lens)]
    used_blocks = sorted({block for row in rows for block in row})
    index = {block: number for number, block in enumerate(used_blocks)}
    blocks = tuple(tuple(index[block] for block in row) for row in rows)
    width = max((len(row) for row in blocks), default=0)
    padded = [[*row, *[-1] * (width - len(row))] for row in blocks]
    dense = torch.tensor(padded, dtype=torch.int32, device="cpu")
    return BlockPlacement(blocks, len(used_blocks), dense.view(len(blocks), width)), used_blocks
