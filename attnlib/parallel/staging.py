"""A scratch cache for keys that a rank needs in one place for one call (X7).

Each request begins a block. The keys have the format of the layer's cache, so that queries see new
keys as they will be read from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec

__all__ = ["Staging", "StagingPlan"]


class StagingPlan(NamedTuple):
    """Where the tokens of a batch are in a scratch cache.

    Attributes:
        num_blocks: blocks that the batch may need.
        block_table: `[R, columns]` int32.
        slots: `[T]` int64, of the packed tokens; -1 for rows past the last request.
    """

    num_blocks: int
    block_table: Tensor
    slots: Tensor

    @classmethod
    def of(
        cls, query_start_loc: Tensor, request: Tensor, longest: int, block_size: int
    ) -> StagingPlan:
        """Arrange packed sequences. Runs on the device without a sync.

        Args:
            query_start_loc: `[R + 1]` int32, where each sequence begins in the packed tokens.
            request: `[T]` int64, the sequence of each token.
            longest: upper bound of the length of a sequence.
            block_size: N.
        """
        tokens, reqs = request.shape[0], query_start_loc.shape[0] - 1
        num_blocks = max(1, tokens // block_size + reqs)
        device = request.device
        blocks = (query_start_loc.diff() + block_size - 1) // block_size
        first = blocks.cumsum(0) - blocks
        columns = torch.arange(max(1, -(-longest // block_size)), device=device)
        table = (first[:, None] + columns).clamp(max=num_blocks - 1).to(torch.int32)
        token = torch.arange(tokens, device=device)
        if reqs == 0:
            return cls(num_blocks, table, torch.full_like(token, -1))
        slots = first[request] * block_size + token - query_start_loc[request]
        return cls(num_blocks, table, torch.where(token < query_start_loc[-1], slots, -1))

    def batch(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The new tokens of a batch alone, as requests without context over the scratch cache."""
        starts, starts_cpu = common.query_start_loc, common.query_start_loc_cpu
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts_cpu,
            seq_lens=starts.diff(),
            seq_lens_cpu=None if starts_cpu is None else starts_cpu.diff(),
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_query_len,
            block_table_tensor=self.block_table,
            slot_mapping=self.slots,
        )


class Staging:
    """The scratch cache of a group of layers; it grows with the batches, when they are built.

    Args:
        spec: of the layers.
        device: of the rank.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._cache: PagedKVCache | None = None
        self._num_blocks = 0

    def reserve(self, num_blocks: int) -> None:
        """Have at least this many blocks from now on."""
        if num_blocks > self._num_blocks:
            self._num_blocks, self._cache = num_blocks, None

    def like(self, cache: PagedKVCache) -> PagedKVCache:
        """The scratch cache, with the layout and the scales of a layer's cache."""
        found = self._cache
        if found is None or found.layout != cache.layout:
            spec, blocks = self._spec, self._num_blocks
            found = PagedKVCache.allocate(spec, blocks, self._device, cache.layout)
            self._cache = found
        if found.page_format is None and found.k_scale is not cache.k_scale:
            found.k_scale = cache.k_scale
        if found.page_format is None and found.v_scale is not cache.v_scale:
            found.v_scale = cache.v_scale
        return found
