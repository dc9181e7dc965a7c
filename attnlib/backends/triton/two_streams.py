"""Two key streams in the `triton` backend (M17): in one launch where a kernel serves the call."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnlib.backends._two_streams import EntryOperations
from attnlib.backends._two_streams import attend_two_streams as attend_separately
from attnlib.backends.base import AttentionImpl
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.compressed import CompressedKeys
from attnlib.ops.triton.entry_stream import EntryStream
from attnlib.ops.triton.merge_states import merge_states
from attnlib.ops.triton.paged_decode import paged_decode
from attnlib.ops.triton.selected_attention import selected_attention
from attnlib.ops.triton.two_streams import two_stream_attention

__all__ = ["attend_two_streams"]

_OPERATIONS = EntryOperations(paged_decode, selected_attention, merge_states)


def attend_two_streams(
    impl: AttentionImpl,
    query: torch.Tensor,
    cache: PagedKVCache,
    metadata: TritonMetadata,
    compressed: CompressedKeys,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    kernels: str,
) -> None:
    """See `AttentionImpl.forward_compressed`.

    Args:
        impl: of the layer.
        query, cache, metadata, compressed, output, lse: of the call.
        kernels: the configured kernels of the backend.
    """
    spec, (slopes, sinks) = impl.spec, impl.per_head_tensors
    batch, stored = compressed.batch, compressed.cache
    assert spec.compressed_entries is not None  # the layer checks the call
    at_once = kernels != "portable" and not spec.batch_invariant and batch.max_entries > 0
    if at_once and metadata.block_table is not None and query.numel():
        entries = EntryStream(
            *(stored.key_cache, stored.value_cache, stored.k_scale, stored.v_scale),
            *(batch.block_table, batch.num_entries, batch.max_entries),
            *(spec.compressed_entries.selection, compressed.selected),
        )
        computed = two_stream_attention(
            *(query, cache.key_cache, cache.value_cache, metadata.block_table),
            *(metadata.query_start_loc, metadata.seq_lens),
            replace(impl.attention_params(metadata, cache), alibi_slopes=slopes, sinks=sinks),
            entries,
            out=output,
            lse=lse,
        )
        if computed:
            return
    attend_separately(impl, _OPERATIONS, query, cache, metadata, compressed, output, lse, kernels)
