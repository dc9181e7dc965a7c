"""The metadata of a batch: lengths on the host and the mask of each request.

The builder creates the masks once per batch; all layers share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
)

__all__ = ["GatherSdpaBuilder", "GatherSdpaMetadata"]


@dataclass(kw_only=True)
class GatherSdpaMetadata(AttentionMetadata):
    """The requests of a batch.

    Attributes:
        query_lens, seq_lens: lengths on the host.
        block_table: [R, max_blocks] int32; entries past the blocks of a request are invalid (P3).
        masks: per request [query_len, seq_len] bool, True where a key is visible.
    """

    query_lens: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    masks: list[torch.Tensor]


class GatherSdpaBuilder(AttentionMetadataBuilder[GatherSdpaMetadata]):
    """Builds the metadata of a batch."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> GatherSdpaMetadata:
        common = common_attn_metadata
        assert common.block_table_tensor is not None  # attn_types declares only decoders
        query_lens, seq_lens = common.query_lens_cpu.tolist(), common.seq_lens_cpu.tolist()
        return GatherSdpaMetadata(
            slot_mapping=common.slot_mapping,
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_table=common.block_table_tensor,
            masks=[
                visible_keys(self.spec, query_len, seq_len, self.device)
                for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
            ],
        )


def visible_keys(
    spec: AttentionSpec, query_len: int, seq_len: int, device: torch.device
) -> torch.Tensor:
    """The mask [query_len, seq_len] bool; bottom-right aligned (M1)."""
    p = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    k = torch.arange(seq_len, device=device)[None, :]
    visible = torch.ones(query_len, seq_len, dtype=torch.bool, device=device)
    if spec.is_causal:
        visible &= k <= p
    left, right = spec.visible_window  # keys before and after the query's own key (M2)
    if left is not None:
        visible &= k >= p - left
    if right is not None:
        visible &= k <= p + right
    return visible
