"""Per-layer attention of the `torch` backend."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from attnlib.backends._two_streams import EntryOperations, attend_two_streams
from attnlib.backends.base import AttentionImpl
from attnlib.backends.torch.metadata import TorchMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.compressed import CompressedKeys
from attnlib.ops.torch.cache_write import write_kv
from attnlib.ops.torch.merge_states import merge_states
from attnlib.ops.torch.paged_decode import paged_decode
from attnlib.ops.torch.paged_prefill import paged_prefill
from attnlib.ops.torch.selected_attention import selected_attention, selects_everything
from attnlib.ops.torch.varlen_prefill import varlen_prefill
from attnlib.sparse.key_selection import SelectedKeys

__all__ = ["TorchImpl"]


class TorchImpl(AttentionImpl):
    """Attention by `ops.torch`: `paged_decode` for decodes, `paged_prefill` for prefills."""

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttentionImpl.write_kv`. A reference uses torch operations on a GPU, too."""
        write_kv(
            key,
            value,
            cache.key_cache,
            cache.value_cache,
            slot_mapping,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            k_format=cache.page_formats[0],
            v_format=cache.page_formats[1],
        )

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: TorchMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`."""
        split = metadata.num_decode_tokens
        decode, prefill = metadata.decode_metadata, metadata.prefill_metadata
        if decode is not None:
            rows = slice(0, None if prefill is None else split)
            operation = partial(paged_decode, plans=decode.decode_plans)
            self._attend(operation, decode, rows, query, cache, output, lse)
        if prefill is not None or decode is None:
            part = metadata if prefill is None else prefill
            self._attend(paged_prefill, part, slice(split, None), query, cache, output, lse)

    def forward_selected(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: TorchMetadata,
        selected_keys: SelectedKeys,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward_selected`. On a CPU, lists that hide no visible key are
        computed like a layer without selection."""
        selection, params = self.spec.key_selection, self.attention_params(metadata, cache)
        assert selection is not None and metadata.block_table is not None
        lengths = (metadata.query_start_loc, metadata.seq_lens)
        if query.device.type == "cpu" and selects_everything(
            selected_keys, selection, *lengths, params
        ):
            self.forward(query, cache, metadata, output, lse)
            return
        selected_attention(
            query,
            cache.key_cache,
            cache.value_cache,
            metadata.block_table,
            *lengths,
            params,
            selection,
            selected_keys,
            out=output,
            lse=lse,
            query_start_loc_cpu=metadata.query_start_loc_cpu,
            seq_lens_cpu=metadata.seq_lens_cpu,
        )

    def forward_compressed(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: TorchMetadata,
        compressed_keys: CompressedKeys,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward_compressed`."""
        operations = EntryOperations(paged_decode, selected_attention, merge_states)
        attend_two_streams(self, operations, query, cache, metadata, compressed_keys, output, lse)

    def forward_unpaged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: TorchMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward_unpaged`."""
        varlen_prefill(
            query,
            key,
            value,
            metadata.query_start_loc,
            metadata.query_start_loc,
            self.attention_params(metadata),
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_query_len,
            out=output,
            lse=lse,
            cu_seqlens_q_cpu=metadata.query_start_loc_cpu,
            cu_seqlens_k_cpu=metadata.query_start_loc_cpu,
            batch_invariant=self.spec.batch_invariant,
        )

    def _attend(
        self,
        operation: Any,
        part: TorchMetadata,
        rows: slice,
        query: torch.Tensor,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        operation(
            query[rows],
            cache.key_cache,
            cache.value_cache,
            part.block_table,
            part.query_start_loc,
            part.seq_lens,
            self.attention_params(part, cache).of_rows(rows),
            max_query_len=part.max_query_len,
            max_seq_len=part.max_seq_len,
            query_start_loc_cpu=part.query_start_loc_cpu,
            seq_lens_cpu=part.seq_lens_cpu,
            batch_invariant=self.spec.batch_invariant,
            out=output[rows],
            lse=None if lse is None else lse[rows],
        )
