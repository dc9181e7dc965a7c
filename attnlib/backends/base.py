"""The interface of a backend: capabilities, a metadata builder and an implementation.

A backend needs two classes. A third one replaces the default metadata:

    class MyImpl(AttentionImpl):                 # per layer: forward(query, cache, metadata, ...)
    class MyBackend(AttentionBackend):           # get_name, get_impl_cls, capabilities
    class MyBuilder(AttentionMetadataBuilder):   # optional, per batch: build(..., common, ...)

Required methods are abstract. Optional methods have working defaults.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from attnlib.backends.attention_impl import AttentionImpl, check_in_place, score_attribute
from attnlib.backends.state_backend import StateBackend
from attnlib.backends.state_impl import StateImpl
from attnlib.backends.step_plan import LayerGroup, StepPlan
from attnlib.cache.layout import layout_named
from attnlib.cache.storage import BlockPairs, PagedKVCache
from attnlib.capabilities import Capabilities, StateCapabilities, unsupported_reasons
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.paged_builder import PagedMetadataBuilder
from attnlib.metadata.state import AttentionState
from attnlib.ops.block_moves import KeysAndValues, swap_tensor_blocks
from attnlib.spec import AttentionSpec, LayerSpec, StateSpec
from attnlib.tuning.tuner import Tuner

__all__ = [
    "AttentionBackend",
    "AttentionImpl",
    "LayerGroup",
    "StateImpl",
    "StepPlan",
    "check_in_place",
    "score_attribute",
]


class AttentionBackend(StateBackend, ABC):
    """Base class of backends. It is not instantiated: all methods are class or static methods.

    Attributes:
        capabilities: the supported features. A field that is not set means "not supported".
        description: one line for tables.
        auto_priority: priority in auto of a backend that is registered without one, by an entry
            point for example: higher ones are tried first (triton has 300, torch 100). None: it is
            selected only by name.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    description: ClassVar[str] = ""
    auto_priority: ClassVar[int | None] = None

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The name by which users select the backend, in lower case."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """The implementation class, instantiated per layer."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """The metadata builder class; the default builds `PagedMetadata`."""
        return PagedMetadataBuilder

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """The dataclass that the builder creates; a layer rejects metadata of any other class.

        The default accepts every class.
        """
        return AttentionMetadata

    @staticmethod
    def get_state_cls() -> type[AttentionState[Any]]:
        """The class that holds the persistent CUDA graph buffers of a model runner."""
        return AttentionState

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """Reasons why the backend cannot run on `device` (package, compiler, driver).

        Must not initialize CUDA and must not use the network.

        Returns:
            The reasons, each with the next action; empty if the backend can run.
        """
        return []

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """Reasons against combinations of features, which single capabilities cannot express.

        Returns:
            The reasons; empty if `spec` has no unsupported combination.
        """
        return []

    @classmethod
    def explain_lines(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """Lines that `explain` prints for an accepted backend: the kernels for prefill and decode.

        Must not import a kernel package and must not initialize CUDA.
        """
        return []

    @classmethod
    def tuner(cls, device: torch.device) -> Tuner | None:
        """The parameters that `attnlib tune` can measure on `device`; None (default) if none."""
        return None

    @classmethod
    def get_operation(cls, name: str) -> Callable[..., Any] | None:
        """An operation that no attention layer runs, with the signature and the semantics of that
        of `attnlib.ops.torch`: `select_keys` (M14), `write_packed_latents` and
        `packed_latent_attention` (P14), `compute_slot_mapping`, `append_kv`, `merge_states`,
        `merge_partial_rows`, `context_attention`, `packed_write`, `packed_decode`,
        `packed_prefill`, `shared_decode`, `attention_scores`, `rotate`, `rotate_and_write` and
        `list_visible_keys`. The conformance suite tests those that a backend has.

        Returns:
            The operation; None (default) if the backend has none with this name.
        """
        return None

    @classmethod
    def validate_configuration(
        cls, spec: LayerSpec, device: torch.device | str | DeviceInfo | None = None
    ) -> list[str]:
        """All reasons why the backend does not support `spec` on `device`; empty if it does.

        This does not check whether the backend is installed; see `unavailable`.
        """
        info = resolve_device(device)
        if isinstance(spec, StateSpec):
            return cls.state_reasons(spec, info)
        assert isinstance(spec, AttentionSpec)
        if (cls.capabilities, cls.state_capabilities) == (Capabilities(), StateCapabilities()):
            return ["states no capabilities, so it serves no layer: define `capabilities`"]
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
        """The logical shape of the cache of one layer (P2).

        Returns:
            `(2, num_blocks, block_size, num_kv_heads, head_size)`; index 0 holds keys, 1 values.
        """
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_cache_stride_order(cls, layout: str | None = None) -> tuple[int, ...]:
        """Order of the dimensions of `get_kv_cache_shape` in memory, outermost first (P2).

        Args:
            layout: name of a layout; None means the preferred layout of this backend.
        """
        reads = cls.capabilities.kv_cache_layouts or ("NHD",)
        preferred = next((name for name in reads if name != "ANY"), "NHD")
        return layout_named(layout or preferred).stride_order

    @staticmethod
    def copy_blocks(
        kv_caches: Sequence[PagedKVCache] | Sequence[KeysAndValues], src_to_dists: BlockPairs
    ) -> None:
        """Copy blocks within the cache of each layer; see `PagedKVCache.copy_blocks`.

        Args:
            kv_caches: caches, tensors `[2, B, ...]` as `get_kv_cache_shape` describes them, or
                pairs of keys and values `[B, ...]`.
            src_to_dists: `[n, 2]`, (source block, destination block).
        """
        for cache in kv_caches:
            if isinstance(cache, PagedKVCache):
                cache.copy_blocks(src_to_dists)
            else:
                swap_tensor_blocks(cache, cache, src_to_dists)

    @staticmethod
    def swap_blocks(
        src_kv_cache: PagedKVCache | KeysAndValues,
        dst_kv_cache: PagedKVCache | KeysAndValues,
        src_to_dst: BlockPairs,
    ) -> None:
        """Copy blocks to another cache, also across devices; see `PagedKVCache.swap_blocks`.

        Args:
            src_kv_cache: a cache, a tensor `[2, B, ...]`, or a pair of keys and values.
            dst_kv_cache: likewise; both are caches or neither is.
            src_to_dst: `[n, 2]`, (source block, destination block).

        Raises:
            ContractError: ids outside a cache, caches of different kinds; nothing is written.
        """
        if isinstance(src_kv_cache, PagedKVCache) and isinstance(dst_kv_cache, PagedKVCache):
            src_kv_cache.swap_blocks(dst_kv_cache, src_to_dst)
        elif isinstance(src_kv_cache, PagedKVCache) or isinstance(dst_kv_cache, PagedKVCache):
            raise ContractError(
                f"swap_blocks got a {type(src_kv_cache).__name__} and a "
                f"{type(dst_kv_cache).__name__}; pass two PagedKVCache or two tensors [2, B, ...]"
            )
        else:
            swap_tensor_blocks(src_kv_cache, dst_kv_cache, src_to_dst)

    @classmethod
    def make_metadata(cls, *args: Any, **kwargs: Any) -> AttentionMetadata:
        """An instance of `get_metadata_cls()`."""
        return cls.get_metadata_cls()(*args, **kwargs)

    @classmethod
    def make_builder(
        cls, spec: LayerSpec, device: torch.device | str | None = None, **kwargs: Any
    ) -> AttentionMetadataBuilder[Any]:
        """A builder with the `config` of this backend.

        Args:
            spec, device, kwargs: arguments of `AttentionMetadataBuilder`.
        """
        if isinstance(spec, StateSpec):
            return cls.make_state_builder(spec, device, **kwargs)
        AttentionSpec.check_kind(spec, "make_builder")
        assert isinstance(spec, AttentionSpec)
        return cls.get_builder_cls().create(spec, device, config=cls.config, **kwargs)

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Module and qualified name, by which another process can import the class."""
        return cls.__module__, cls.__qualname__
