"""The interface of a backend: one class that ties a declaration, a builder and an implementation together.

A backend needs two classes; a third one replaces the default metadata:

    class MyImpl(AttentionImpl):                 # per layer: forward(query, cache, metadata, ...)
    class MyBackend(AttentionBackend):           # get_name, get_impl_cls, capabilities
    class MyBuilder(AttentionMetadataBuilder):   # optional, per batch: build(..., common, ...)

Required methods are abstract, optional methods have working defaults.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import torch

from attnlib.cache.layout import layout_named
from attnlib.cache.storage import BlockPairs, PagedKVCache
from attnlib.capabilities import Capabilities, unsupported_reasons
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.paged_builder import PagedMetadataBuilder
from attnlib.metadata.state import AttentionState
from attnlib.ops.params import AttentionParams
from attnlib.spec import AttentionSpec
from attnlib.tuning.tuner import Tuner

__all__ = ["AttentionBackend", "AttentionImpl", "LayerGroup", "StepPlan"]


class AttentionBackend(ABC):
    """One way to compute attention. A class that is never instantiated: everything is a class or static method.

    Attributes:
        capabilities: what it can do; every field left out counts as "cannot" (fail closed).
        description: one line for tables.
        config: settings given at registration; they reach the builder and every impl.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    description: ClassVar[str] = ""
    config: ClassVar[Mapping[str, Any]] = {}

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The name that users choose it by, in lower case."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """The per-layer class."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """The per-batch class; by default it builds `PagedMetadata`."""
        return PagedMetadataBuilder

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """The dataclass that the builder creates; a layer rejects metadata of any other class.

        The default accepts every class.
        """
        return AttentionMetadata

    @staticmethod
    def get_state_cls() -> type[AttentionState[Any]]:
        """The class of what is kept for a runner's lifetime (graph buffers)."""
        return AttentionState

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """Why it cannot run here at all (package, compiler, driver), each with the next action; empty when it can. No CUDA start-up, no network."""
        return []

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """Reasons that no single capability can express (one feature with another); empty when there are none."""
        return []

    @classmethod
    def explain_lines(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """Lines that `explain` prints for an accepted backend: the kernels for prefill and decode.

        Must not import a kernel package and must not initialize CUDA.
        """
        return []

    @classmethod
    def tuner(cls, device: torch.device) -> Tuner | None:
        """The parameters that `attnlib tune` can measure on `device`; None (the default) if there are none."""
        return None

    @classmethod
    def validate_configuration(
        cls, spec: AttentionSpec, device: torch.device | str | DeviceInfo | None = None
    ) -> list[str]:
        """Every reason why it cannot serve `spec` on `device`, availability aside; empty means that it fits."""
        info = resolve_device(device)
        return unsupported_reasons(spec, info, cls.capabilities) + cls.supports_combination(
            spec, info
        )

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype: str | torch.dtype = "auto",
    ) -> tuple[int, ...]:
        """The logical shape of one layer's cache: `(2, num_blocks, block_size, num_kv_heads, head_size)`, keys then values (P2)."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_cache_stride_order(cls, layout: str | None = None) -> tuple[int, ...]:
        """For each physical dimension, outermost first, which dimension of `get_kv_cache_shape` it is (P2).

        Args:
            layout: a layout's name; None means the one that this backend reads best.
        """
        reads = cls.capabilities.kv_cache_layouts or ("NHD",)
        preferred = next((name for name in reads if name != "ANY"), "NHD")
        return layout_named(layout or preferred).stride_order

    @staticmethod
    def copy_blocks(kv_caches: Sequence[PagedKVCache], src_to_dists: BlockPairs) -> None:
        """Copy blocks (source, destination) within each layer's cache; see `PagedKVCache.copy_blocks`."""
        for cache in kv_caches:
            cache.copy_blocks(src_to_dists)

    @staticmethod
    def swap_blocks(
        src_kv_cache: PagedKVCache, dst_kv_cache: PagedKVCache, src_to_dst: BlockPairs
    ) -> None:
        """Copy blocks of one cache into another, across devices too; see `PagedKVCache.swap_blocks`."""
        src_kv_cache.swap_blocks(dst_kv_cache, src_to_dst)

    @classmethod
    def make_metadata(cls, *args: Any, **kwargs: Any) -> AttentionMetadata:
        """An instance of `get_metadata_cls()`."""
        return cls.get_metadata_cls()(*args, **kwargs)

    @classmethod
    def make_builder(
        cls, spec: AttentionSpec, device: torch.device | str | None = None, **kwargs: Any
    ) -> AttentionMetadataBuilder[Any]:
        """A builder with this backend's `config`; keyword arguments as `AttentionMetadataBuilder` takes them."""
        return cls.get_builder_cls()(spec, device, config=cls.config, **kwargs)

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """(module, qualified name), to find the class again in another process."""
        return cls.__module__, cls.__qualname__


class StepPlan(Protocol):
    """One kind of call over one batch, prepared: cache write and attention (`AttentionImpl.plan`)."""

    def run(
        self,
        impl: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write the new keys and values, then attend.

        Args:
            impl: of the layer that calls, for what is a layer's own (sinks, slopes).
            query, key, value, output: flat or per head, as the layer was called. `key` and `value`
                are None where nothing is written.
            cache: the layer's cache, a `PagedKVCache`; None where keys are not cached.
            lse: `[T, Hq]` float32 or None.
        """


class LayerGroup:
    """Identity of the layers that may share a step plan: equal backend, spec, scale and config.

    Attributes:
        has_plan: whether `AttentionImpl.plan` stands for the `forward` and `write_kv` of these
            layers. It does not where a subclass or an assignment replaced one of these and kept an
            inherited `plan`.
    """

    __slots__ = ("__weakref__", "has_plan")

    def __init__(self, has_plan: bool) -> None:
        self.has_plan = has_plan


_groups: WeakValueDictionary[Any, LayerGroup] = WeakValueDictionary()


class AttentionImpl(ABC):
    """One layer's attention on one backend.

    Args:
        spec: what the layer needs; already accepted by the backend.
        scale: softmax scale; None means 1/sqrt(head_size).
        alibi_slopes: `[Hq]` of a floating-point dtype, when `spec.has_alibi`.
        sinks: `[Hq]` of a floating-point dtype, when `spec.has_sink`.
        kv_sharing_target_layer_name: the layer whose cache this one reads (P8).
        config: the backend's own settings.
        prefix: the layer's name, for messages.

    Attributes:
        alibi_slopes, sinks: `[Hq]` float32 or None. A layer owns these tensors as parameters or
            buffers; they are read from there at every call.

    Raises:
        ContractError: slopes or sinks without the spec declaring them, the other way round, or of
            the wrong shape or dtype.
    """

    _group: LayerGroup | None = None

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        scale: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        kv_sharing_target_layer_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        self.spec = spec
        self.scale = spec.head_size**-0.5 if scale is None else float(scale)
        _check_per_head("alibi_slopes", alibi_slopes, spec.has_alibi, "has_alibi", spec.num_heads)
        _check_per_head("sinks", sinks, spec.has_sink, "has_sink", spec.num_heads)
        self._owner: Any = SimpleNamespace(alibi_slopes=alibi_slopes, sinks=sinks)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.config = dict(config or {})
        self.prefix = prefix

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_group"] = None  # plans depend on the impl's attributes
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None}  # groups are interned per process

    @property
    def alibi_slopes(self) -> torch.Tensor | None:
        """`[Hq]` float32, or None."""
        return _as_float32(self._owner.alibi_slopes)

    @alibi_slopes.setter
    def alibi_slopes(self, values: torch.Tensor | None) -> None:
        self._owner.alibi_slopes = values

    @property
    def sinks(self) -> torch.Tensor | None:
        """`[Hq]` float32, or None."""
        return _as_float32(self._owner.sinks)

    @sinks.setter
    def sinks(self, values: torch.Tensor | None) -> None:
        self._owner.sinks = values

    def read_per_head_tensors_from(self, owner: Any) -> None:
        """Read `alibi_slopes` and `sinks` from these attributes of `owner` (the layer) from now on."""
        self._owner = owner

    @property
    def per_head_tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Slopes and sinks in the dtype that they are stored in."""
        return self._owner.alibi_slopes, self._owner.sinks

    @property
    def group(self) -> LayerGroup:
        """Equal for layers whose plans are interchangeable: those of one class with equal spec,
        scale and config. An impl whose methods were replaced is a group of its own."""
        found: LayerGroup | None = self._group
        if found is None:
            key = (type(self), self.spec, self.scale, tuple(sorted(self.config.items())))
            replaced = {"forward", "write_kv", "forward_unpaged", "plan"} & self.__dict__.keys()
            found = LayerGroup(not replaced and _has_current_plan(type(self)))
            if not replaced:
                try:
                    found = _groups.setdefault(key, found)
                except TypeError:  # the config has a value that cannot be hashed
                    pass
            self.__dict__["_group"] = found
        return found

    def attention_params(self, metadata: Any, cache: PagedKVCache | None = None) -> AttentionParams:
        """The parameters of this layer's attention over a batch, as the operations of `ops` take them.

        Args:
            metadata: has `causal` and `query_bias`, as `PagedMetadata` does.
            cache: its KV scales apply; None means scales of 1.
        """
        spec = self.spec
        return AttentionParams(
            scale=self.scale,
            causal=metadata.causal,
            window=spec.visible_window.as_kernel_args(),
            attention_chunk_size=spec.attention_chunk_size or 0,
            logits_soft_cap=spec.logits_soft_cap or 0.0,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            query_bias=metadata.query_bias,
            k_scale=1.0 if cache is None else cache.k_scale,
            v_scale=1.0 if cache is None else cache.v_scale,
        )

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend to what is in the cache; new keys are there already (P7).

        Args:
            query: `[T, Hq, D]`, strided (P9).
            cache: this layer's cache.
            metadata: what this backend's builder made.
            output: `[T, Hq, Dv]`, strided, written in place; rows at or past the batch's tokens become 0 (M6).
            lse: `[T, Hq]` float32, written in place when given (M5).
        """

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values to their slots (P4); by default with torch operations.

        Args:
            key: `[T, Hkv, D]`, strided; may be longer than `slot_mapping`.
            value: `[T, Hkv, Dv]`, likewise.
            cache: this layer's cache.
            slot_mapping: `[T]` int64; -1 writes nothing.
        """
        from attnlib.ops.torch.cache_write import write_kv

        write_kv(
            key,
            value,
            cache.key_cache,
            cache.value_cache,
            slot_mapping,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )

    def plan(
        self,
        signature: Hashable,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> StepPlan | None:
        """Prepare a kind of call over a batch; None (the default): the layer calls `write_kv` and
        `forward` for every call instead.

        The layer asks once per batch and call signature, after its checks, and before anything is
        written. It runs the plan for every call of that signature over the same `metadata`, by any
        layer of the group. The signature covers the layer group and dtypes, shapes, strides and
        devices of all tensors, so that calls differ in addresses and values only. A plan may keep
        what it read from `metadata`: the layer drops plans when a field is assigned.

        Args:
            signature: hashable; also a key for what outlives the batch (compiled launches).
            query: `[T, Hq, D]` of the first such call, like all tensors here.
            key, value: `[T, Hkv, D]` and `[T, Hkv, Dv]`; None where the layer writes nothing.
            output: `[T, Hq, Dv]`.
            lse: `[T, Hq]` float32 or None.
        """
        return None

    def forward_unpaged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend to keys that were never cached (encoders): `key` `[Tk, Hkv, D]` and `value` `[Tk, Hkv, Dv]` are packed like the queries."""
        raise UnsupportedConfigError(
            f"{type(self).__name__} attends through the paged cache only; attn_type={self.spec.attn_type.value} needs another backend (torch has it)"
        )


def _has_current_plan(cls: type[AttentionImpl]) -> bool:
    """Whether no class below the one that defines `plan` defines `forward` or `write_kv`."""
    defined = [
        next(place for place, base in enumerate(cls.__mro__) if name in vars(base))
        for name in ("plan", "forward", "write_kv")
    ]
    return cls.plan is not AttentionImpl.plan and defined[0] <= min(defined[1:])


def _check_per_head(
    name: str, values: torch.Tensor | None, declared: bool, flag: str, num_heads: int
) -> None:
    if (values is not None) != declared:
        given = "given" if values is not None else "missing"
        raise ContractError(
            f"{name} {given}, but the spec says {flag}={declared}: the backend was chosen by the "
            "spec, so both must agree"
        )
    if values is None:
        return
    if values.shape != (num_heads,) or not values.is_floating_point():
        raise ContractError(
            f"{name} is {values.dtype} {tuple(values.shape)}; it must be floating-point "
            f"[{num_heads}], one value per query head"
        )
    if values.stride(0) != 1 and num_heads > 1:
        raise ContractError(f"{name} has stride {values.stride(0)}; call .contiguous() on it")


def _as_float32(values: torch.Tensor | None) -> torch.Tensor | None:
    return values if values is None or values.dtype == torch.float32 else values.float()
