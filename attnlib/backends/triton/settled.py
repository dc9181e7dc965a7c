"""Decode steps served again: what `TritonImpl.settle` returns, around the operations' `DecodeStep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnlib.backends.base import AttentionImpl
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.ops.triton.arguments import Options
from attnlib.ops.triton.decode_step import DecodeBatch, DecodeStep, settle

__all__ = ["SettledDecode", "settle_decode"]


class SettledDecode:
    """A decode step over one batch, for layers that mean the same.

    Args:
        batch: what it read from the metadata.
        num_tokens: T of the batch.
        step: its launches.
    """

    __slots__ = ("_batch", "_num_tokens", "_step")

    def __init__(self, batch: DecodeBatch, num_tokens: int, step: DecodeStep) -> None:
        self._batch = batch
        self._num_tokens = num_tokens
        self._step = step

    def __call__(
        self,
        impl: AttentionImpl,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        metadata: TritonMetadata,
        output: torch.Tensor,
    ) -> bool:
        """See `Settled`."""
        batch = self._batch
        if (
            metadata.slot_mapping is not batch.slot_mapping
            or metadata.block_table is not batch.block_table
            or metadata.query_start_loc is not batch.query_start_loc
            or metadata.seq_lens is not batch.seq_lens
            or metadata.workspace is not batch.workspace
            or metadata.max_seq_len != batch.max_seq_len
            or metadata.max_query_len != batch.max_query_len
            or metadata.num_actual_tokens != self._num_tokens
        ):
            return False
        return self._step(query, key, value, cache.key_cache, cache.value_cache, impl.sinks, output)


def settle_decode(
    impl: AttentionImpl,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: PagedKVCache,
    metadata: TritonMetadata,
    output: torch.Tensor,
    meaning: Mapping[str, Any],
    kernels: str,
) -> SettledDecode | None:
    """The step that repeats a call of `impl` just made; None where it cannot be repeated directly.

    Args:
        query, key, value, cache, metadata, output: of that call.
        meaning: scale, window and the other options of the layer, as the operations take them.
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
    )
    options = Options(causal=metadata.causal, query_bias=None, out=output, lse=None, k_scale=1.0, v_scale=1.0, **meaning)
    step = settle(query, key, value, cache.key_cache, cache.value_cache, batch, options, kernels)
    return None if step is None else SettledDecode(batch, metadata.num_actual_tokens, step)
