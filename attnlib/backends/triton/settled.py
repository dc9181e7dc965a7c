"""Decode steps served again: what `TritonImpl.settle` returns, around what the operations repeat."""

from __future__ import annotations

import torch

from attnlib.backends.base import AttentionImpl, Settled
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.decode_step import DecodeBatch, Repeat, settle
from attnlib.ops.triton.launch.signature import Options

__all__ = ["settle_decode"]


def settle_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: PagedKVCache,
    metadata: TritonMetadata,
    output: torch.Tensor,
    params: AttentionParams,
    kernels: str,
) -> Settled | None:
    """What repeats a call just made; None where it cannot be repeated directly.

    Args:
        query, key, value, cache, metadata, output: of that call.
        params: likewise, with scales of 1.
        kernels: likewise.
    """
    if metadata.slot_mapping is None or metadata.block_table is None:
        return None
    batch = DecodeBatch(
        metadata.slot_mapping,
        metadata.block_table,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.max_query_len,
        metadata.max_seq_len,
        metadata.workspace,
        metadata.counters,
    )
    options = Options.from_params(params, output, None)
    repeat = settle(query, key, value, cache.key_cache, cache.value_cache, batch, options, kernels)
    return None if repeat is None else _guarded(repeat, batch, metadata)


def _guarded(repeat: Repeat, batch: DecodeBatch, before: TritonMetadata) -> Settled:
    """`repeat`, for layers that nobody serves in another way, while the metadata holds what it held `before`: the same objects."""
    slots, table, starts, lens = (
        batch.slot_mapping,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
    )
    workspace, counters = batch.workspace, batch.counters
    causal, bias, longest_query, longest = (
        before.causal,
        before.query_bias,
        before.max_query_len,
        before.max_seq_len,
    )
    num_tokens, num_decodes, num_prefills = (
        before.num_actual_tokens,
        before.num_decodes,
        before.num_prefills,
    )

    def serve(
        impl: AttentionImpl,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        metadata: TritonMetadata,
        output: torch.Tensor,
    ) -> bool:
        own = impl.__dict__
        if "forward" in own or "write_kv" in own:
            return False
        if (
            metadata.slot_mapping is not slots
            or metadata.block_table is not table
            or metadata.query_start_loc is not starts
            or metadata.seq_lens is not lens
            or metadata.workspace is not workspace
            or metadata.counters is not counters
            or metadata.causal is not causal
            or metadata.query_bias is not bias
            or metadata.max_query_len is not longest_query
            or metadata.max_seq_len is not longest
            or metadata.num_actual_tokens is not num_tokens
            or metadata.num_decodes is not num_decodes
            or metadata.num_prefills is not num_prefills
        ):
            return False
        return repeat(query, key, value, cache.key_cache, cache.value_cache, impl.sinks, output)

    return serve
