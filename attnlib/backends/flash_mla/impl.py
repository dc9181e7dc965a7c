"""Per-layer attention of the `flash_mla` backend: one call per query length."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from attnlib.backends._foreign.imports import keywords_of
from attnlib.backends._foreign.outputs import apply_sinks, clear_rows, fill_empty, store_lse
from attnlib.backends.base import AttentionImpl, StepPlan
from attnlib.backends.flash_mla.metadata import FlashMLAMetadata, UniformPart
from attnlib.backends.flash_mla.probe import find_flash_mla
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import BackendUnavailableError, ContractError

__all__ = ["FlashMLAImpl"]


class FlashMLAImpl(AttentionImpl):
    """Attention by FlashMLA.

    Raises:
        BackendUnavailableError: FlashMLA cannot be imported.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        found = find_flash_mla()
        if found.module is None:
            raise BackendUnavailableError(found.problem or "flash_mla is not installed")
        self._module: Any = found.module
        # The build of vLLM writes to a given tensor.
        self._takes_out = "out" in keywords_of(self._module.flash_mla_with_kvcache)

    def plan(
        self,
        signature: Hashable,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        metadata: FlashMLAMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> StepPlan | None:
        """Checks the cache before it is written; FlashMLA plans in the first call of a batch."""
        latents = cache.key_cache
        if not latents[0].is_contiguous():
            raise ContractError(
                f"key_cache of layer {self.prefix or '(unnamed)'} has strides {latents.stride()}; "
                "FlashMLA reads blocks whose latents are contiguous: choose triton for this cache",
                rule="P1",
            )
        return None

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: FlashMLAMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`."""
        if not metadata.covers_batch:
            fill_empty(output, lse, self.sinks)
        for part in metadata.parts:
            self._attend(part, query, cache, metadata, output, lse)
        clear_rows(output, lse, metadata.query_start_loc, metadata.num_unpadded_tokens)

    def _attend(
        self,
        part: UniformPart,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: FlashMLAMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        heads = query.shape[1]
        if part.schedule is None:
            part.schedule = self._module.get_mla_metadata(part.seq_lens, part.query_len * heads, 1)
        assert metadata.block_table is not None  # checked by paged_fields
        target = self._target(output, part)
        # FlashMLA checks its shape as if the query tokens were heads: [B, 1, S * Hq, Dv].
        shape = (-1, 1, part.query_len * heads, self.spec.head_size_v)
        out, logs = self._module.flash_mla_with_kvcache(
            query[part.tokens].contiguous().view(-1, part.query_len, *query.shape[1:]),
            cache.key_cache,
            metadata.block_table[part.requests].contiguous(),
            part.seq_lens,
            self.spec.head_size_v,
            *part.schedule,
            softmax_scale=self.scale,
            causal=bool(metadata.causal),
            **({} if target is None else {"out": target.view(shape)}),
        )
        rows = out.flatten(0, 1) if target is None else target
        if lse is not None or self.sinks is not None:
            found = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
            store_lse(logs.transpose(1, 2).flatten(0, 1), found)  # [B, Hq, S]
            if self.sinks is not None:
                rows = rows.contiguous()
                apply_sinks(rows, found, self.sinks)
            if lse is not None:
                lse[part.tokens] = found
        if target is None:
            output[part.tokens] = rows

    def _target(self, output: torch.Tensor, part: UniformPart) -> torch.Tensor | None:
        """The rows of a part, where FlashMLA can write them in place."""
        if not self._takes_out or not isinstance(part.tokens, slice):
            return None
        rows = output[part.tokens]
        return rows if rows.is_contiguous() else None
