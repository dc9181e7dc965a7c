"""The base class of builders, which make the metadata of a backend for a batch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from attnlib.device import resolve_device
from attnlib.metadata.batch_metadata import AttentionMetadata
from attnlib.metadata.builder_checks import as_captured, checked_limits, with_checks
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.host_lengths import with_host_lengths
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.metadata.split import reorder_batch_to_split_decodes_and_prefills
from attnlib.metadata.strides import refuse_strided
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import BatchLimits

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Self

__all__ = ["AttentionMetadataBuilder", "M"]

M = TypeVar("M", bound=AttentionMetadata)


class _FullCudaGraph:
    """A bool that follows from `cudagraph_support` of a builder or of a builder class."""

    def __get__(self, builder: Any, cls: Any) -> bool:
        owner = cls if builder is None else builder
        return owner.cudagraph_support is CudaGraphSupport.ALWAYS


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
    follows_device: ClassVar[bool] = False
    """Whether kernels read every length and block in the tensors of the batch: they follow changes
    in place, within the bounds of the batch. Query lengths on the host may then differ from those
    on the device, if both agree on the decode part and on the number of its tokens."""
    clone_settings: Mapping[str, Any] = {}
    """Arguments of the constructor of a subclass besides those above, for a clone."""
    checks_batches: ClassVar[bool] = True
    """Whether its methods check their batch before they run, and get it in the form that
    `CommonAttentionMetadata` describes. False for builders of other interfaces."""

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
        self.limits = checked_limits(limits)

    @classmethod
    def create(cls, spec: AttentionSpec, device: Any = None, **kwargs: Any) -> Self:
        """A builder from the arguments of this class, also of a subclass whose constructor takes
        others; `AttentionBackend.make_builder` and clones of states call it."""
        return cls(spec, device, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Every `build` of a subclass checks the batch first: a builder need not call this one."""
        super().__init_subclass__(**kwargs)
        for name in ("build", "build_for_cudagraph_capture", "build_for_drafting"):
            if cls.checks_batches and isinstance(method := vars(cls).get(name), FunctionType):
                setattr(cls, name, with_checks(method))

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
        return as_captured(self, self.build(0, common_attn_metadata))

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

    def warmup_lengths(self, limits: BatchLimits) -> list[tuple[int, ...]]:
        """Query lengths of further batches that `warmup` runs, over the longest sequences."""
        return []

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
