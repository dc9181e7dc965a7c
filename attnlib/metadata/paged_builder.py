"""The default metadata builder: the whole batch as one part, without backend-specific fields."""

from __future__ import annotations

from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata, paged_fields

__all__ = ["PagedMetadataBuilder"]


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Builds `PagedMetadata`; with `reorder_batch_threshold`, it also separates the decodes."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedMetadata:
        """The metadata of one batch; see `AttentionMetadataBuilder.build`."""
        common = common_attn_metadata
        if self.needs_host_lengths:
            common = self.with_host_lengths(common)
        fields = paged_fields(
            common,
            self.spec,
            self.reorder_batch_threshold,
            needs_host_lengths=self.needs_host_lengths,
        )
        return PagedMetadata(**fields)
