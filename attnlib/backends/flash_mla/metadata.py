"""Metadata of the `flash_mla` backend: one call for each query length of the batch.

The kernel takes batches whose requests have equally many query tokens, `[B, S, Hq, D]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from attnlib.backends._foreign.latents import latent_batch
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata
from attnlib.spec import CudaGraphSupport

__all__ = ["FlashMLAMetadata", "FlashMLAMetadataBuilder", "UniformPart"]


@dataclass
class UniformPart:
    """The requests of one query length.

    Attributes:
        query_len: S.
        requests: their numbers, as an index: `[B]` int64 device, or a slice.
        tokens: their query tokens, likewise: `[B * S]`.
        seq_lens: `[B]` int32 device.
        schedule: what FlashMLA plans for the part, as (tile_scheduler_metadata, num_splits); None
            before the first layer. Layers share it.
    """

    query_len: int
    requests: torch.Tensor | slice
    tokens: torch.Tensor | slice
    seq_lens: torch.Tensor
    schedule: tuple[Any, Any] | None = None


@dataclass(kw_only=True)
class FlashMLAMetadata(PagedMetadata):
    """A batch for FlashMLA.

    Attributes:
        parts: the requests by query length. Requests without queries or keys are in none.
        covers_batch: whether the parts have all tokens of the batch.
        num_unpadded_tokens: tokens of requests, without padding.
    """

    parts: list[UniformPart] = field(default_factory=list)
    covers_batch: bool
    num_unpadded_tokens: int


class FlashMLAMetadataBuilder(AttentionMetadataBuilder[FlashMLAMetadata]):
    """Groups the requests of a batch by their query lengths, on the host."""

    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashMLAMetadata:
        """The metadata of one batch.

        Raises:
            ContractError: as `latent_batch`.
        """
        common, fields = latent_batch(self, common_attn_metadata, "FlashMLA")
        assert common.query_start_loc_cpu is not None and common.seq_lens_cpu is not None
        starts = common.query_start_loc_cpu.long()
        lengths = common.query_lens_cpu.long()
        has_keys = common.seq_lens_cpu > 0
        parts, covered = [], 0
        for query_len in sorted(set(lengths[has_keys & (lengths > 0)].tolist())):
            requests = ((lengths == query_len) & has_keys).nonzero()[:, 0]
            tokens = (starts[requests, None] + torch.arange(query_len, device="cpu")).flatten()
            covered += tokens.shape[0]
            parts.append(
                UniformPart(
                    query_len,
                    self._index(requests),
                    self._index(tokens),
                    fields["seq_lens"][requests.to(self.device)],
                )
            )
        end = int(starts[-1])
        return FlashMLAMetadata(
            **fields, parts=parts, covers_batch=covered == end, num_unpadded_tokens=end
        )

    def _index(self, numbers: torch.Tensor) -> torch.Tensor | slice:
        """Ascending numbers as an index. The first ones are a slice, which copies nothing in the
        calls of the layers: decodes, which precede other requests, and batches of one length."""
        count = numbers.shape[0]
        return slice(count) if int(numbers[-1]) == count - 1 else numbers.to(self.device)
