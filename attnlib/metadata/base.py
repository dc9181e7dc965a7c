"""Base classes: the metadata of a backend for one batch, and the builder that creates it."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from attnlib.compile.objects import register_tensor_id
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata, refuse_strided
from attnlib.metadata.facts import BatchFacts, FoundFacts
from attnlib.metadata.host_lengths import with_host_lengths
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.metadata.split import reorder_batch_to_split_decodes_and_prefills
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import BatchLimits

if TYPE_CHECKING:
    import numpy as np

__all__ = ["AttentionMetadata", "AttentionMetadataBuilder", "M"]


class _FullCudaGraph:
    """A bool that follows from `cudagraph_support` of a builder or of a builder class."""

    def __get__(self, builder: Any, cls: Any) -> bool:
        owner = cls if builder is None else builder
        return owner.cudagraph_support is CudaGraphSupport.ALWAYS


@functools.lru_cache(maxsize=256)
def _cached_properties(cls: Any) -> tuple[str, ...]:
    """Names of the cached properties of a class: values derived from its fields."""
    names = (name for base in cls.__mro__ for name, value in vars(base).items()
             if isinstance(value, functools.cached_property))  # fmt: skip
    return tuple(names)


@dataclass(kw_only=True)
class AttentionMetadata:
    """The metadata of one batch for one backend. Subclasses are dataclasses that add the fields
    that their kernels need.

    Values of its tensors may change in place, as those of CUDA graph buffers do. Their storage must
    not change. Assigning a field drops all values that were derived from the fields. Fields in
    `fixed_fields` cannot be assigned.

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

    A subclass that defines `__post_init__` must call this one.
    """

    fixed_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields from which the builder computed other fields of the batch."""

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
        object.__setattr__(self, name, value)

    def drop_plans(self) -> None:
        """Drop all step plans: the next call prepares its launches again."""
        self.__dict__["plans"], self.__dict__["recent_plan"] = {}, None

    def __getstate__(self) -> dict[str, Any]:
        cls: Any = type(self)
        derived = {"handle", "plans", "recent_plan", *_cached_properties(cls)}
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, plans={}, recent_plan=None)
        self.__dict__["handle"] = register_tensor_id(self)

    @functools.cached_property
    def facts(self) -> BatchFacts:
        """What the fields of a subclass say about the batch, for layers and tools."""
        return FoundFacts.of(self)

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


M = TypeVar("M", bound=AttentionMetadata)


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Converts `CommonAttentionMetadata` to the metadata of a backend, once per batch and not once
    per layer, without a host sync.

    A builder has one workspace and one set of counters, which all its batches share. Batches of one
    builder must run one after the other, on one stream or on streams ordered by events; make one
    builder per stream to overlap batches. ATTNLIB_VALIDATE=1 refuses batches that overlap.

    Args:
        spec: the spec of all layers that use this builder.
        device: where the kernels run; None means a GPU if torch sees one, else the CPU.
        layer_names: the layers that use this builder, for messages.
        layers: scale, window and soft cap of each layer, for kernels that need them when a batch is
            planned; None if the kernels take them in each call.
        config: settings of the backend, from its registration.
        limits: the largest batch that is ever built. Buffers are then allocated once, in the
            constructor. Without limits they grow with the batches. `AttentionState` requires
            limits.
    """

    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.NEVER
    """Which batches can be captured; equal to `Capabilities.cudagraph` of the backend."""
    reorder_batch_threshold: ClassVar[int | None] = None
    """Requests with at most this many new tokens form the decode part and should come first in the
    batch. None: the order does not matter."""
    needs_host_lengths: ClassVar[bool] = True
    """Whether `build` reads the lengths on the host (`query_start_loc_cpu`, `seq_lens_cpu`). If
    False, they may be None: a runner with lengths on the device only then needs no copy per batch,
    and can capture steps of any shape. If True, `build` calls `with_host_lengths` first."""

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

    full_cudagraph_supported = _FullCudaGraph()
    """Whether every batch can be captured; see `cudagraph_support` for the exact level. Also an
    attribute of the class, as in vLLM."""

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        """The metadata of one batch.

        Args:
            common_prefix_len: leading tokens that all requests share; 0 if unknown. A hint for
                cascade attention that must not change a result. Built-in backends have no cascade
                attention and do not read it; their `use_cascade_attention` is False.
            common_attn_metadata: the batch.
            fast_build: prefer a fast build to fast kernels (draft models with few layers).
        """

    @classmethod
    def max_decode_query_len(cls, spec: AttentionSpec) -> int:
        """The most new tokens of a request that the decode kernels can serve.

        A builder with `config={"decode_query_len": n}`, n up to this value, puts requests of up to
        n new tokens into the decode part. Cascades do so for shared prefixes, which have few query
        rows and many keys.
        """
        return cls.reorder_batch_threshold or 1

    @property
    def shared_decode_shape(self) -> tuple[int, int] | None:
        """(keys of a tile, ranges of tiles) for `ops.shared_decode.schedule_items`, with which a
        cascade of this backend divides decodes; None without such a kernel."""
        return None

    def with_host_lengths(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The batch with `query_start_loc_cpu` and `seq_lens_cpu`. On a CPU the batch's own tensors
        serve if these are None.

        Raises:
            ContractError: the host does not have the lengths; names this builder and the field.
        """
        return with_host_lengths(common, type(self).__name__)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """The metadata to capture a CUDA graph with; by default the result of `build`.

        Raises:
            ContractError: the batch has strided metadata.
        """
        refuse_strided(common_attn_metadata)
        return self.build(0, common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> M:
        """The metadata of one draft step of speculative decoding."""
        return self.build(0, common_attn_metadata, fast_build=True)

    def seq_len_bounds(self, num_reqs: int, least: int, most: int) -> list[int]:
        """Values of `max_seq_len` at which a batch uses different kernels; a warm-up runs them all.

        The default is `least` and `most`: the same kernels serve all lengths.

        Args:
            num_reqs: requests in the batch.
            least, most: first and last value, in tokens.
        """
        return sorted({least, most})

    def warmup_metadata(self, limits: BatchLimits) -> Iterator[tuple[M, int]]:
        """Batches that `warmup` runs besides those of query and sequence lengths, each with its
        number of tokens. The default is none.

        They write no slot, and read block 0 of the cache only.

        Args:
            limits: the largest batch.
        """
        yield from ()

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether `cudagraph_support` allows to capture a batch with these query lengths."""
        if self.cudagraph_support is CudaGraphSupport.ALWAYS:
            return True
        if self.cudagraph_support is CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE:
            return common_attn_metadata.max_query_len <= 1
        if self.cudagraph_support is CudaGraphSupport.UNIFORM_BATCH:
            common = common_attn_metadata
            if common.query_start_loc_cpu is None:  # uniform only if no request can be shorter
                return common.num_actual_tokens == common.num_reqs * common.max_query_len
            lengths = common.query_lens_cpu
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
        """Whether cascade attention over the common prefix is faster; by default False."""
        return False

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """Move decodes to the front of the runner's batch, with as few swaps as possible.

        Decodes are requests with at most `reorder_batch_threshold` new tokens.

        Returns:
            True if the batch was changed.
        """
        if self.reorder_batch_threshold is None:
            return False
        return reorder_batch_to_split_decodes_and_prefills(
            input_batch, scheduler_output, self.reorder_batch_threshold
        )

    def update_block_table(
        self, metadata: M, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> M:
        """The metadata of the same batch with other blocks, for another layer group of the same
        shape. All other fields are reused."""
        changes: dict[str, Any] = {"block_table": block_table, "slot_mapping": slot_mapping}
        return dataclasses.replace(metadata, **changes)
