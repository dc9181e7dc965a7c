"""What the metadata of any backend says about its batch.

`AttentionMetadata.facts` is what layers, checks and tools read. The metadata of paged backends has
all of it and is its own `BatchFacts`. The fields of other metadata are read by name in one place,
`FoundFacts.of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from attnlib.spec import AttentionSpec

__all__ = ["BatchFacts", "FoundFacts"]


class BatchFacts(Protocol):
    """The fields of a batch, with the names of `PagedMetadata`; None where the metadata of a
    backend has no such field, or keeps another type under its name.

    Shapes: R requests, T new tokens.
    """

    @property
    def spec(self) -> AttentionSpec | None:
        """The spec that the batch was built for."""

    @property
    def num_actual_tokens(self) -> int | None:
        """T."""

    @property
    def query_start_loc(self) -> torch.Tensor | None:
        """`[R + 1]` int32 on the device."""

    @property
    def query_start_loc_cpu(self) -> torch.Tensor | None:
        """The copy on the host."""

    @property
    def seq_lens(self) -> torch.Tensor | None:
        """`[R]` int32 on the device."""

    @property
    def seq_lens_cpu(self) -> torch.Tensor | None:
        """The copy on the host."""

    @property
    def block_table(self) -> torch.Tensor | None:
        """`[R, max_blocks]` int32."""

    @property
    def slot_mapping(self) -> torch.Tensor | None:
        """`[T]` int64."""

    @property
    def max_query_len(self) -> int | None:
        """An upper bound."""

    @property
    def max_seq_len(self) -> int | None:
        """An upper bound."""

    @property
    def num_decodes(self) -> int:
        """Requests of the decode part."""

    @property
    def max_decode_query_len(self) -> int | None:
        """An upper bound over the decode part."""

    @property
    def prefill_query_start_loc(self) -> torch.Tensor | None:
        """Starts of the prefill part of a batch with both parts."""

    @property
    def causal(self) -> bool | torch.Tensor | None:
        """For the batch or per request."""

    @property
    def causal_from_spec(self) -> bool:
        """Whether the batch left `causal` to the spec."""

    @property
    def query_bias(self) -> torch.Tensor | None:
        """`[T, >= max_query_len]` float32."""

    @property
    def score_tensors(self) -> Mapping[str, torch.Tensor] | None:
        """Batch tensors of the score function by name."""

    @property
    def is_cross_attention(self) -> bool:
        """Whether the keys are those of another sequence."""


@dataclass(kw_only=True)
class FoundFacts:
    """The facts that the metadata of a backend has under the names of `BatchFacts`."""

    spec: AttentionSpec | None = None
    num_actual_tokens: int | None = None
    query_start_loc: torch.Tensor | None = None
    query_start_loc_cpu: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    slot_mapping: torch.Tensor | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None
    num_decodes: int = 0
    max_decode_query_len: int | None = None
    prefill_query_start_loc: torch.Tensor | None = None
    causal: bool | torch.Tensor | None = None
    causal_from_spec: bool = False
    query_bias: torch.Tensor | None = None
    score_tensors: Mapping[str, torch.Tensor] | None = None
    is_cross_attention: bool = False

    @classmethod
    def of(cls, source: object) -> FoundFacts:
        """The facts of a batch."""
        found: dict[str, Any] = {}
        for field in fields(cls):
            value = getattr(source, field.name, None)
            if field.type == "torch.Tensor | None" and not isinstance(value, torch.Tensor):
                continue  # a plug-in's metadata may keep a list under the name
            if value is not None:
                found[field.name] = value
        return cls(**found)
