"""The base class of the metadata of a backend for one batch."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from attnlib.compile.objects import register_tensor_id
from attnlib.errors import ContractError
from attnlib.metadata.facts import BatchFacts, FoundFacts
from attnlib.metadata.fixed_tensors import FixedTensors
from attnlib.metadata.host_lengths import LengthsRead

__all__ = ["AttentionMetadata"]


@functools.lru_cache(maxsize=256)
def _cached_properties(cls: Any) -> tuple[str, ...]:
    """Names of the cached properties of a class: values derived from its fields."""
    names = (
        name
        for base in cls.__mro__
        for name, value in vars(base).items()
        if isinstance(value, functools.cached_property)
    )
    return tuple(names)


@dataclass(kw_only=True)
class AttentionMetadata:
    """The metadata of one batch for one backend. Subclasses are dataclasses that add the fields
    that their kernels need.

    Values of its tensors may change in place, as those of CUDA graph buffers do, within the upper
    bounds of the batch and its division into decodes and prefills. Their storage must not change.
    Lengths on a GPU may not change where the builder has read their copies on the host
    (`needs_host_lengths`); the next call is an error then, except in inference mode. Assigning a
    field drops all values that were derived from the fields. Fields in `fixed_fields` cannot be
    assigned; `score_tensors` is replaced, not changed.

    Attributes:
        num_prefills: requests in the prefill part.
        num_prefill_tokens: tokens of the prefill part.
        num_decode_tokens: tokens of the decode part.
        slot_mapping: [T] int64 device (P4), or None where nothing is cached.
        multi_modal_placeholder_index_maps: for engines that set it; attnlib does not read it.
        enable_kv_scales_calculation: every layer that writes a quantized cache computes its scales
            from the keys and values of this step before it writes them. A layer or a cache that has
            scales keeps them; a step that writes zeros or nothing leaves them unset. Set it until
            the first step of a cache that writes, and not in a CUDA graph. Synchronizes.
        cross_attention: the metadata of the cross-attention layers of an encoder-decoder model for
            the same batch, or None.
        handle: id of this batch for torch.compile (not a field: a copy has its own).
        plans: step plans by call signature (not a field: a copy starts without plans).
        recent_plan: the plan used last, with a fast check of its signature; likewise.
        lengths_read: set by a builder that has read lengths on the host of a GPU's batch; likewise.
        is_captured: of `build_for_cudagraph_capture`, where lengths on the device decide: the host
            has those of the capture, whatever the tensors hold now; likewise.

    A subclass that defines `__post_init__` must call this one.
    """

    fixed_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields from which the builder computed other fields of the batch."""
    lengths_read: ClassVar[LengthsRead | None] = None  # of an instance, where a builder sets it
    is_captured: ClassVar[bool] = False  # likewise

    num_prefills: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    slot_mapping: torch.Tensor | None
    multi_modal_placeholder_index_maps: Mapping[str, Any] | None = None
    enable_kv_scales_calculation: bool = False
    cross_attention: AttentionMetadata | None = None

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Any:
        """The instance with these fields, for builders: quicker than the constructor, whose
        assignments pass through `__setattr__`. Fields with a default may be missing. The dictionary
        becomes that of the instance."""
        metadata = object.__new__(cls)
        object.__setattr__(metadata, "__dict__", fields)
        metadata.__post_init__()
        return metadata

    def __post_init__(self) -> None:
        self.handle: torch.Tensor
        self.recent_plan: Any
        self.plans: dict[Hashable, Any]
        # From here on `__setattr__` takes the batch as constructed, which it sees by its plans.
        state = self.__dict__
        state["handle"] = register_tensor_id(self)
        state["recent_plan"], state["plans"] = None, {}
        if state.get("score_tensors") is not None:
            state["score_tensors"] = FixedTensors(state["score_tensors"])

    def __setattr__(self, name: str, value: Any) -> None:
        state = self.__dict__
        if "plans" in state:  # constructed: derived values must follow the fields
            if name in self.fixed_fields:
                raise ContractError(
                    f"{name} of a {type(self).__name__} cannot be assigned, because other fields "
                    f"were computed from it: build the batch again, or call "
                    f"builder.update_block_table for other blocks"
                )
            self.drop_plans()
            cls: Any = type(self)
            for cached in _cached_properties(cls):
                state.pop(cached, None)
        if name == "score_tensors" and value is not None:
            value = FixedTensors(value)
        object.__setattr__(self, name, value)

    def drop_plans(self) -> None:
        """Drop all step plans: the next call prepares its launches again."""
        self.__dict__["plans"], self.__dict__["recent_plan"] = {}, None

    def __getstate__(self) -> dict[str, Any]:
        cls: Any = type(self)
        derived = {"handle", "lengths_read", "plans", "recent_plan", *_cached_properties(cls)}
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, plans={}, recent_plan=None)
        self.__dict__["handle"] = register_tensor_id(self)

    @functools.cached_property
    def facts(self) -> BatchFacts:
        """What the fields of a subclass say about the batch, for layers and tools."""
        return FoundFacts.of(self)

    def behind_queries(self) -> AttentionMetadata:
        """This batch, for calls behind a kernel that writes nothing but their queries and lets
        others start only after all earlier kernels have ended: keys may be read while it runs. By
        default this batch itself."""
        return self

    @property
    def prefill_metadata(self) -> AttentionMetadata | None:
        """The prefill part as a batch, or None; by default the whole batch."""
        return self

    @property
    def decode_metadata(self) -> AttentionMetadata | None:
        """The decode part as a batch, or None; by default None."""
        return None

    def asdict_zerocopy(self, skip_fields: set[str] | None = None) -> dict[str, Any]:
        """The fields as a dictionary, without copies of tensors (unlike `dataclasses.asdict`)."""
        skip = skip_fields or set()
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in skip
        }
