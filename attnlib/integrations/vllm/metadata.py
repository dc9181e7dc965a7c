"""The metadata that vLLM passes from builder to layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnlib.integrations.vllm.masks import Mask
from attnlib.parallel import ParallelMetadata
from attnlib.spec import AttentionSpec

__all__ = ["VllmMetadata"]


@dataclass
class VllmMetadata:
    """One batch for a group of layers. vLLM copies it field by field for layers that share a cache
    (fast prefill), so that it holds attnlib's metadata instead of being one.

    Attributes:
        num_actual_tokens: tokens of the batch, without padding outside of graphs.
        batches: attnlib's metadata by the spec of a layer. Layers of a group may differ in window
            and soft cap.
        distributed: likewise with decode context parallelism, instead of `batches`.
        mask: of the batch.
        mm_prefix_range_tensor: the image spans under `Mask.SPANS`. Models set it to None for layers
            in which images are causal (Gemma 4); `batches` then has the metadata of that mask, too.
        slot_mapping: of cross-attention, where vLLM sets and reads it.
    """

    num_actual_tokens: int
    batches: Mapping[AttentionSpec, Any]
    distributed: Mapping[AttentionSpec, ParallelMetadata] | None = None
    mask: Mask = Mask.OWN
    mm_prefix_range_tensor: Any = None
    slot_mapping: Any = None

    @property
    def causal(self) -> bool:
        """False for drafts that see each other, which vLLM asserts (DFlash)."""
        return self.mask is not Mask.FULL

    @property
    def mask_of_layer(self) -> Mask:
        """The mask for the layers that read this object."""
        cleared = self.mask is Mask.SPANS and self.mm_prefix_range_tensor is None
        return Mask.OWN if cleared else self.mask
