"""The metadata that vLLM passes from builder to layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnlib.spec import AttentionSpec

__all__ = ["DistributedBatch", "VllmMetadata"]


@dataclass
class DistributedBatch:
    """A batch of a decode context parallel group.

    Attributes:
        cached: the keys in this rank's part of the cache that the queries see.
        new: the new tokens of the batch, not read from the cache; None if `cached` contains all
            keys (each request decodes one token).
    """

    cached: Any
    new: Any


@dataclass
class VllmMetadata:
    """One batch for a group of layers. vLLM copies it field by field for layers that share a cache
    (fast prefill), so that it holds attnlib's metadata instead of being one.

    Attributes:
        num_actual_tokens: tokens of the batch, without padding outside of graphs.
        batches: attnlib's metadata by the spec of a layer. Layers of a group may differ in window
            and soft cap.
        distributed: with decode context parallelism, instead of `batches`.
    """

    num_actual_tokens: int
    batches: Mapping[AttentionSpec, Any]
    distributed: DistributedBatch | None = None
