"""The values of a spec that have a type of their own: roles, masks, windows, CUDA graphs."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

__all__ = ["AttentionType", "CudaGraphSupport", "MaskKind", "Window"]


class AttentionType(str, Enum):
    """Role of a layer in its model. Members are strings because torch.compile can trace these."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"

    __str__ = str.__str__  # also in f-strings, as of a plain string


class MaskKind(str, Enum):
    """The keys that are visible before any window is applied."""

    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"
    PER_REQUEST = "per_request"
    """One flag per request: `CommonAttentionMetadata.causal` is a bool tensor."""
    QUERY_BIAS = "query_bias"
    """Causal, plus an additive bias among the new tokens (`CommonAttentionMetadata.query_bias`),
    for example the mask of a speculation tree. Not with windows, chunks, ALiBi or score functions
    of positions, which such tokens have in common (M3)."""


class CudaGraphSupport(IntEnum):
    """Batches that a CUDA graph can capture. A model supports the minimum over its layers."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class Window(NamedTuple):
    """Visible keys around the query's own position (M2).

    Attributes:
        left: number of visible keys before it; None for all, 0 for none.
        right: number of visible keys after it; None for all, 0 for none.
    """

    left: int | None = None
    right: int | None = None

    @property
    def is_full(self) -> bool:
        """True if neither side is bounded."""
        return self.left is None and self.right is None

    def as_kernel_args(self) -> tuple[int, int]:
        """(left, right) for the kernels, with -1 for an unbounded side."""
        return (-1 if self.left is None else self.left, -1 if self.right is None else self.right)
