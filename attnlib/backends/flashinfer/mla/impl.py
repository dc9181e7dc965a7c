"""Per-layer attention of the `flashinfer_mla` backend: one call of the planned wrapper."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from attnlib.backends._foreign.outputs import (
    apply_sinks,
    clear_rows,
    convert_base2_lse,
    fill_empty,
    rows_without_keys,
)
from attnlib.backends.base import AttentionImpl, StepPlan
from attnlib.backends.flashinfer.mla.metadata import FlashInferMLAMetadata
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError

__all__ = ["FlashInferMLAImpl"]

_ALIGNED = 8
"""Elements of 16 bits in a load of 16 bytes."""


class FlashInferMLAImpl(AttentionImpl):
    """Attention by FlashInfer's MLA wrapper."""

    def plan(
        self,
        signature: Hashable,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        metadata: FlashInferMLAMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> StepPlan | None:
        """Checks the cache before it is written; FlashInfer plans in the first layer of a batch."""
        latents = cache.key_cache
        if not _is_aligned(latents):
            raise ContractError(
                f"key_cache of layer {self.prefix or '(unnamed)'} has strides {latents.stride()}; "
                f"FlashInfer loads 16 bytes at a time, so that strides and address must be "
                f"multiples of {_ALIGNED} elements: choose triton for this cache",
                rule="P1",
            )
        return None

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: FlashInferMLAMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`."""
        end, size = metadata.num_unpadded_tokens, self.spec.head_size_v
        if end == 0:
            fill_empty(output, lse)
            return
        rows = query[:end]
        if not _is_aligned(rows):
            rows = rows.contiguous()
        sinks = self.sinks
        out = output[:end]
        target = out if out.is_contiguous() else torch.empty_like(out, memory_format=_PACKED)
        logs = None if lse is None else lse[:end]
        if logs is None and sinks is not None:
            logs = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
        wrapper = metadata.planned(self.scale, logs is not None)
        metadata.form.run(wrapper, rows, cache.key_cache[:, :, 0], size, target, logs)
        if logs is not None:
            empty = rows_without_keys(metadata, slice(0, end), bool(metadata.causal))
            convert_base2_lse(logs, logs, empty)
            if sinks is not None:
                apply_sinks(target, logs, sinks)
        if target is not out:
            out.copy_(target)
        clear_rows(output, lse, metadata.query_start_loc, end)


_PACKED = torch.contiguous_format


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every row of 16-bit elements begins at a multiple of 16 bytes."""
    strides = tensor.stride()[:-1]
    return tensor.data_ptr() % 16 == 0 and all(stride % _ALIGNED == 0 for stride in strides)
