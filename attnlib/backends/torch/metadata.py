"""Metadata of the `torch` backend: the common paged metadata, nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata, paged_fields

__all__ = ["TorchMetadata", "TorchMetadataBuilder"]


@dataclass(kw_only=True)
class TorchMetadata(PagedMetadata):
    """A batch for plain torch; the lengths on the host spare it every sync."""


class TorchMetadataBuilder(AttentionMetadataBuilder[TorchMetadata]):
    """Decodes of up to 8 new tokens go the decode way."""

    reorder_batch_threshold: ClassVar[int | None] = 8

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TorchMetadata:
        """The batch, cut into decodes and prefills."""
        return TorchMetadata(
            **paged_fields(common_attn_metadata, self.spec, self.reorder_batch_threshold)
        )
