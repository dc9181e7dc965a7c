"""Per-layer attention of the `triton` backend: decodes and prefills side by side on one batch."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.backends.base import AttentionImpl, Settled
from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.backends.triton.settled import settle_decode
from attnlib.cache.storage import PagedKVCache
from attnlib.ops.triton.cache_write import write_kv
from attnlib.ops.triton.paged_decode import paged_decode
from attnlib.ops.triton.paged_mixed import Half, paged_mixed
from attnlib.ops.triton.paged_prefill import paged_prefill
from attnlib.ops.triton.varlen_prefill import varlen_prefill

__all__ = ["TritonImpl"]


class TritonImpl(AttentionImpl):
    """Attention by attnlib's own kernels. On a Hopper chip the Gluon kernels serve what they can and
    are quicker at; `config={"kernels": "portable"}` keeps to the plain ones, "hopper" takes the others wherever they can."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kernels = str(self.config.get("kernels", "auto"))

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See `AttentionImpl.write_kv`."""
        write_kv(
            key,
            value,
            cache.key_cache,
            cache.value_cache,
            slot_mapping,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: TritonMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`."""
        if metadata.num_prefills == 0 and metadata.num_decodes:
            self._decode(metadata, query, cache, output, lse)
            return
        if metadata.num_decodes == 0:
            self._prefill(metadata, query, cache, output, lse)
            return
        split, decode, prefill = (
            metadata.num_decode_tokens,
            metadata.decode_metadata,
            metadata.prefill_metadata,
        )
        assert decode is not None and prefill is not None  # both counts are above 0
        paged_mixed(
            _half(decode, query[:split], output[:split], None if lse is None else lse[:split]),
            _half(prefill, query[split:], output[split:], None if lse is None else lse[split:]),
            cache.key_cache,
            cache.value_cache,
            self.attention_params(metadata, cache),
            workspace=decode.workspace,
            counters=prefill.counters,
            kernels=self._kernels,
        )

    def settle(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        metadata: TritonMetadata,
        output: torch.Tensor,
    ) -> Settled | None:
        """Decode steps are repeated by a handful of launches; the rest is served as before. See `AttentionImpl.settle`."""
        if (type(self).forward, type(self).write_kv) != _SETTLED:
            return None  # somebody serves calls in another way
        if (
            metadata.num_prefills
            or not metadata.num_decodes
            or self.alibi_slopes is not None
            or metadata.query_bias is not None
        ):
            return None
        if not isinstance(metadata.causal, bool):
            return None
        params = self.attention_params(metadata)
        return settle_decode(query, key, value, cache, metadata, output, params, self._kernels)

    def forward_unpaged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: TritonMetadata,
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
        )

    def _decode(
        self,
        part: TritonMetadata,
        query: torch.Tensor,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        assert part.block_table is not None  # the builder refuses a paged layer without one
        paged_decode(
            query,
            cache.key_cache,
            cache.value_cache,
            part.block_table,
            part.query_start_loc,
            part.seq_lens,
            self.attention_params(part, cache),
            max_query_len=part.max_query_len,
            max_seq_len=part.max_seq_len,
            out=output,
            lse=lse,
            workspace=part.workspace,
            counters=part.counters,
            kernels=self._kernels,
        )

    def _prefill(
        self,
        part: TritonMetadata,
        query: torch.Tensor,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        assert part.block_table is not None  # the builder refuses a paged layer without one
        paged_prefill(
            query,
            cache.key_cache,
            cache.value_cache,
            part.block_table,
            part.query_start_loc,
            part.seq_lens,
            self.attention_params(part, cache),
            max_query_len=part.max_query_len,
            max_seq_len=part.max_seq_len,
            out=output,
            lse=lse,
            kernels=self._kernels,
            counters=part.counters,
        )


_SETTLED = (TritonImpl.forward, TritonImpl.write_kv)
"""What a settled step stands for."""


def _half(
    part: TritonMetadata, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None
) -> Half:
    assert part.block_table is not None  # the builder refuses a paged layer without one
    return Half(
        query,
        part.block_table,
        part.query_start_loc,
        part.seq_lens,
        part.max_query_len,
        part.max_seq_len,
        output,
        lse,
    )
