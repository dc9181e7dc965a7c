"""Metadata of the `torch` backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.paged import PagedMetadata, paged_fields

__all__ = ["TorchMetadata", "TorchMetadataBuilder"]


@dataclass(kw_only=True)
class TorchMetadata(PagedMetadata):
    """The common paged metadata; lengths are read on the host, without synchronization.

    Attributes:
        decode_plans: what the layers of the batch share in decodes; see `ops.torch.paged_decode`.
    """

    decode_plans: dict[Any, Any] = field(default_factory=dict)


class TorchMetadataBuilder(AttentionMetadataBuilder[TorchMetadata]):
    """Requests with up to 8 new tokens are decodes."""

    reorder_batch_threshold: ClassVar[int | None] = 8

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TorchMetadata:
        """The metadata of one batch; see `AttentionMetadataBuilder.build`."""
        common = self.with_host_lengths(common_attn_metadata)
        return TorchMetadata(**paged_fields(common, self.spec, self.reorder_batch_threshold))
