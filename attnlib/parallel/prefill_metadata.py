"""The batches of prompts whose tokens are divided among ranks (X10)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlib.compile.objects import register_tensor_id
from attnlib.metadata.base import AttentionMetadata
from attnlib.parallel.divisions import Division
from attnlib.parallel.metadata import GivenScales
from attnlib.parallel.staging import Staging
from attnlib.spec import AttentionSpec

__all__ = ["PrefillMetadata", "PrefillStep"]


@dataclass(eq=False)
class PrefillStep:
    """The keys of one rank, or of all.

    Attributes:
        slots: `[rows]` int64, of the received new keys in the scratch cache; -1 for padding.
        context_slots: `[rows]` int64, of the received context in the scratch cache; rows of padding
            have a slot that nothing reads.
        metadata: the queries of this rank over these keys; None if they see none of them.
        is_causal: whether the keys are at the end of those that the queries see.
    """

    slots: Tensor
    context_slots: Tensor
    metadata: AttentionMetadata | None
    is_causal: bool


@dataclass(eq=False)
class PrefillMetadata(GivenScales):
    """One batch of prompts on one rank.

    Attributes:
        made_for: spec and division of the layers that may use it.
        token_rows: `[T]` int64, this rank's tokens among the packed new tokens of all prompts.
        positions: `[T]` int32, of these tokens in their requests.
        num_actual_tokens: T, of this rank.
        num_padded_tokens: of the rank with most tokens; what each rank sends.
        is_ring: whether keys are passed around, or gathered.
        steps: one per rank, beginning with this one and going back; or one for all keys.
        cache_slots: `[world_size, num_padded_tokens]` int64, where this rank stores the keys of the
            tokens of each rank; -1 for those of other ranks.
        context_slots: `[rows]` int64, in this rank's cache, of the context that it sends; empty if
            new tokens see no context on any rank.
        scratch: the memory of one step.
        agreed: whether all ranks have agreed on a call.
    """

    made_for: tuple[AttentionSpec, Division]
    token_rows: Tensor
    positions: Tensor
    num_actual_tokens: int
    num_padded_tokens: int
    is_ring: bool
    steps: list[PrefillStep]
    cache_slots: Tensor
    context_slots: Tensor
    scratch: Staging
    agreed: bool = False

    def __post_init__(self) -> None:
        self.handle = register_tensor_id(self)
