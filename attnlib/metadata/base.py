"""A backend's own view of a batch, and the builder that makes it."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from attnlib.compile.objects import register_tensor_id
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.metadata.split import reorder_batch_to_split_decodes_and_prefills
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import BatchLimits

if TYPE_CHECKING:
    import numpy as np

__all__ = ["AttentionMetadata", "AttentionMetadataBuilder", "M"]


@functools.cache
def _cached_properties(cls: Any) -> tuple[str, ...]:
    """Names of the cached properties of a class: values derived from its fields."""
    names = (name for base in cls.__mro__ for name, value in vars(base).items()
             if isinstance(value, functools.cached_property))  # fmt: skip
    return tuple(names)


@dataclass(kw_only=True)
class AttentionMetadata:
    """The metadata of one batch in a backend's own form. Subclasses are dataclasses that add what
    their kernels need.

    Values of its tensors may change in place (CUDA graph buffers do); their storage may not.
    Assigning a field drops everything that was derived from the fields. Fields in `fixed_fields`
    cannot be assigned.

    Attributes:
        num_prefills: requests in the prefill part.
        num_prefill_tokens: tokens of the prefill part.
        num_decode_tokens: tokens of the decode part.
        slot_mapping: [>= T] int64 device (P4), or None where nothing is cached.
        multi_modal_placeholder_index_maps: for engines that attach it; attnlib does not read it.
        enable_kv_scales_calculation: likewise.
        handle: id of this batch for torch.compile (not a field: a copy has its own).
        plans: step plans by call signature (not a field: a copy starts without plans).
        recent_plan: the plan used last, with a fast check of its signature; likewise.

    A subclass with a `__post_init__` of its own calls this one.
    """

    fixed_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields from which the builder computed other fields of the batch."""

    num_prefills: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    slot_mapping: torch.Tensor | None
    multi_modal_placeholder_index_maps: Mapping[str, Any] | None = None
    enable_kv_scales_calculation: bool = False

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Any:
        """The instance with these fields, for builders: quicker than the constructor, whose
        assignments pass through `__setattr__`. Fields with a default may be missing."""
        metadata = object.__new__(cls)
        metadata.__dict__.update(fields)
        metadata.__post_init__()
        return metadata

    def __post_init__(self) -> None:
        self.handle = register_tensor_id(self)
        self.recent_plan: Any = None
        self.plans: dict[Hashable, Any] = {}  # set last: `__setattr__` takes it as constructed

    def __setattr__(self, name: str, value: Any) -> None:
        state = self.__dict__
        if "plans" in state:  # constructed: derived values must follow the fields
            if name in self.fixed_fields:
                raise ContractError(
                    f"{name} of a {type(self).__name__} cannot be assigned, because other fields "
                    f"were computed from it: build the batch again, or call "
                    f"builder.update_block_table for other blocks"
                )
            state["plans"], state["recent_plan"] = {}, None
            cls: Any = type(self)
            for cached in _cached_properties(cls):
                state.pop(cached, None)
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        cls: Any = type(self)
        derived = {"handle", "plans", "recent_plan", *_cached_properties(cls)}
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, plans={}, recent_plan=None)
        self.__dict__["handle"] = register_tensor_id(self)

    @property
    def prefill_metadata(self) -> AttentionMetadata | None:
        """The prefill requests as a batch, or None; by default the whole batch is one prefill."""
        return self

    @property
    def decode_metadata(self) -> AttentionMetadata | None:
        """The decode requests as a batch, or None; by default there are none."""
        return None

    def asdict_zerocopy(self, skip_fields: set[str] | None = None) -> dict[str, Any]:
        """Field -> value without copying tensors (`dataclasses.asdict` copies deeply)."""
        skip = skip_fields or set()
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in skip
        }


M = TypeVar("M", bound=AttentionMetadata)


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Turns `CommonAttentionMetadata` into a backend's metadata: once per batch, not once per layer. No host sync.

    Args:
        spec: the layers' spec; all layers served by one builder share it.
        device: where the kernels run; None means a GPU where torch sees one, else the CPU.
        layer_names: the layers that this builder serves, for messages.
        layers: scale, window and soft cap of each layer, for kernels that plan with them; () when the kernels take them at the call.
        config: the backend's own settings, as given at registration.
        limits: the largest batch that will ever be built. Buffers are then allocated once, here; without limits they grow as batches do.
    """

    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.NEVER
    reorder_batch_threshold: ClassVar[int | None] = None
    """Requests with at most this many new tokens go the decode way and want to stand first; None: the order does not matter."""
    needs_host_lengths: ClassVar[bool] = True
    """Whether `build` reads the lengths on the host (`query_start_loc_cpu`, `seq_lens_cpu`). A builder that says False is also right when they are
    all 0: a runner that knows lengths on the device only then spares a copy for each batch, and can capture steps of any shape."""

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device | str | None = None,
        *,
        layer_names: Sequence[str] = (),
        layers: Mapping[str, PerLayerParameters] | None = None,
        config: Mapping[str, Any] | None = None,
        limits: BatchLimits | None = None,
    ) -> None:
        self.spec = spec
        self.device = resolve_device(device).torch_device
        self.layer_names = tuple(layer_names or (layers or ()))
        self.layers = dict(layers or {})
        self.config = dict(config or {})
        self.limits = limits

    @property
    def kv_cache_spec(self) -> AttentionSpec:
        """vLLM's name for `spec`."""
        return self.spec

    @property
    def full_cudagraph_supported(self) -> bool:
        """True when every batch can be captured; `cudagraph_support` gives the level."""
        return self.cudagraph_support is CudaGraphSupport.ALWAYS

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        """The backend's metadata of one batch.

        Args:
            common_prefix_len: leading tokens that all requests share; 0 when unknown. A backend without cascade attention ignores it.
            common_attn_metadata: the batch.
            fast_build: prefer a quick build over quick kernels (drafts that serve a few layers only).
        """

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """The metadata to capture a CUDA graph with; by default an ordinary build."""
        return self.build(0, common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> M:
        """The metadata of one draft step of speculative decoding."""
        return self.build(0, common_attn_metadata, fast_build=True)

    def seq_len_bounds(self, num_reqs: int, least: int, most: int) -> list[int]:
        """Upper bounds on sequences, from `least` to `most`, among which a batch of `num_reqs` may meet different kernels: what a warm-up runs.

        By default the two ends, between which the same kernels read more or fewer keys.
        """
        return sorted({least, most})

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether this batch can be captured, by `cudagraph_support` and the batch's query lengths."""
        if self.cudagraph_support is CudaGraphSupport.ALWAYS:
            return True
        if self.cudagraph_support is CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE:
            return common_attn_metadata.max_query_len <= 1
        if self.cudagraph_support is CudaGraphSupport.UNIFORM_BATCH:
            lengths = common_attn_metadata.query_lens_cpu
            lengths = lengths[lengths > 0]  # padding rows have none
            return lengths.numel() == 0 or bool((lengths == lengths[0]).all())
        return False

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: np.ndarray,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        num_sms: int,
    ) -> bool:
        """Whether attending to the common prefix once for the whole batch would pay; False unless a backend knows better."""
        return False

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """Bring the requests that go the decode way to the front of the runner's batch, with as few swaps as possible.

        Returns:
            True when the batch was changed.
        """
        if self.reorder_batch_threshold is None:
            return False
        return reorder_batch_to_split_decodes_and_prefills(
            input_batch, scheduler_output, self.reorder_batch_threshold
        )

    def update_block_table(
        self, metadata: M, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> M:
        """The same batch with other blocks (another layer group of the same shape): everything else is reused."""
        changes: dict[str, Any] = {"block_table": block_table, "slot_mapping": slot_mapping}
        return dataclasses.replace(metadata, **changes)
