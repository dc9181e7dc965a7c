"""Attention of one layer, one request at a time. The cache write is inherited."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnlib import AttentionImpl, PagedKVCache
from attnlib_plugin_example.metadata import GatherSdpaMetadata

__all__ = ["GatherSdpaImpl"]


class GatherSdpaImpl(AttentionImpl):
    """Gathers the pages of each request and calls scaled_dot_product_attention."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: GatherSdpaMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        row = 0
        for request, query_len in enumerate(metadata.query_lens):
            rows = slice(row, row + query_len)
            row += query_len
            table, seq_len = metadata.block_table[request], metadata.seq_lens[request]
            output[rows] = self.attend(query[rows], cache, table, seq_len, metadata.masks[request])
        output[row:] = 0  # padding rows (M6)

    def attend(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        table: torch.Tensor,
        seq_len: int,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of one request: query [q, Hq, D] -> [q, Hq, D]."""
        if seq_len == 0:
            return torch.zeros_like(query)  # no key (M5)
        position = torch.arange(seq_len, device=query.device)
        index = (table[position // cache.block_size].long(), position % cache.block_size)
        keys = cache.key_cache[index].to(query.dtype)  # the cache may have another dtype
        values = cache.value_cache[index].to(query.dtype)
        out = scaled_dot_product_attention(
            query.transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=True,
        )
        no_key = ~mask.any(dim=1)  # torch leaves rows without a visible key undefined
        return out.transpose(0, 1).masked_fill(no_key[:, None, None], 0)
