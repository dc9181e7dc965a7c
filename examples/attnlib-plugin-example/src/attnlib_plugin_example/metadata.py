"""Once per batch: the lengths as plain numbers and the visible keys of each request as a mask, shared by all layers."""

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
    """A batch, request by request.

    Attributes:
        query_lens, seq_lens: plain numbers.
        block_table: [R, max_blocks] int32; entries past a request's blocks are garbage (P3).
        masks: per request [query_len, seq_len] bool, True where a key is visible.
    """

    query_lens: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    masks: list[torch.Tensor]

    @property
    def prefill_metadata(self) -> GatherSdpaMetadata | None:
        """Every request goes this way."""
        return self if self.num_prefills else None

    @property
    def decode_metadata(self) -> GatherSdpaMetadata | None:
        """There is no way of its own for decodes."""
        return None


class GatherSdpaBuilder(AttentionMetadataBuilder[GatherSdpaMetadata]):
    """Builds the masks where they are shared: once per batch, not once per layer."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> GatherSdpaMetadata:
        common = common_attn_metadata
        assert common.block_table_tensor is not None  # the card admits decoders only
        query_lens, seq_lens = common.query_lens_cpu.tolist(), common.seq_lens_cpu.tolist()
        return GatherSdpaMetadata(
            num_prefills=common.num_reqs,
            num_prefill_tokens=common.num_actual_tokens,
            num_decode_tokens=0,
            slot_mapping=common.slot_mapping,
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_table=common.block_table_tensor,
            masks=[
                visible(self.spec, q, s, self.device)
                for q, s in zip(query_lens, seq_lens, strict=True)
            ],
        )


def visible(
    spec: AttentionSpec, query_len: int, seq_len: int, device: torch.device
) -> torch.Tensor:
    """[query_len, seq_len] bool: causal is bottom-right (M1); a window counts the query's own key (M2)."""
    p = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    k = torch.arange(seq_len, device=device)[None, :]
    seen = (
        (k <= p)
        if spec.is_causal
        else torch.ones(query_len, seq_len, dtype=torch.bool, device=device)
    )
    left, right = spec.visible_window
    if left is not None:
        seen = seen & (k >= p - left)
    if right is not None:
        seen = seen & (k <= p + right)
    return seen
