"""vLLM's v1 base class of builders, and builders from vLLM's arguments."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.compat.vllm.config import config_of, spec_of
from attnlib.device import resolve_device
from attnlib.metadata.builder import AttentionMetadataBuilder as Builder
from attnlib.metadata.common import CommonAttentionMetadata as Common
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import BatchLimits

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AttentionMetadataBuilder", "M", "make_builder"]

M = TypeVar("M")


class AttentionMetadataBuilder(Builder[Any], Generic[M]):
    """Base class of builders with vLLM's constructor; subclasses define `build`.

    A subclass gets the batch as the caller made it. It need not call this constructor. A backend of
    attnlib whose `get_builder_cls` returns it can be registered: layers, states and `make_builder`
    then create it with the spec as `kv_cache_spec`, and with an object that has the attributes of a
    `vllm_config` that attnlib reads itself (`compat.vllm.config.config_of`).

    Args:
        kv_cache_spec: an `attnlib.AttentionSpec`, or an object with vLLM's fields (`block_size`,
            `num_kv_heads`, `head_size`, `dtype`, `use_mla`, `sliding_window`).
        vllm_config: gives the number of query heads; not read for an `attnlib.AttentionSpec`.
        device: where the batches run.
    """

    checks_batches = False
    full_cudagraph_supported: ClassVar[bool] = False  # type: ignore[misc]
    """Whether every batch can be captured; sets `cudagraph_support`."""
    kv_cache_spec: Any = None
    vllm_config: Any = None
    limits: BatchLimits | None = None

    def __init__(self, kv_cache_spec: Any, vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.vllm_config = vllm_config
        self.device = resolve_device(device).torch_device

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if vars(cls).get("full_cudagraph_supported"):
            cls.cudagraph_support = CudaGraphSupport.ALWAYS
        if (build := vars(cls).get("build")) is not None:
            cls.build = _by_keywords(build)  # type: ignore[method-assign]

    @classmethod
    def create(cls, spec: AttentionSpec, device: Any = None, **kwargs: Any) -> Self:
        """See `attnlib.AttentionMetadataBuilder.create`. `config` may have `kv_cache_spec` and
        `vllm_config`, the objects to construct the builder with."""
        limits, layers = kwargs.get("limits"), dict(kwargs.get("layers") or {})
        config = dict(kwargs.get("config") or {})
        found = {
            "kv_cache_spec": config.get("kv_cache_spec") or spec,
            "vllm_config": config.get("vllm_config") or config_of(spec, limits),
            "device": resolve_device(device).torch_device,
        }
        builder = cls(*found.values())
        own = {"spec": spec, "config": config, "layers": layers}
        own["layer_names"] = tuple(kwargs.get("layer_names") or layers)
        for name, value in (found | own).items():  # what its constructor has not set
            vars(builder).setdefault(name, value)
        builder.limits = limits
        return builder

    @functools.cached_property
    def spec(self) -> AttentionSpec:  # type: ignore[override]
        """`kv_cache_spec` as a spec of attnlib."""
        return spec_of(self.kv_cache_spec, self.vllm_config)

    def can_run_in_cudagraph(self, common_attn_metadata: Common) -> bool:
        """False, whatever `full_cudagraph_supported` says; subclasses override it."""
        return False

    def build_for_cudagraph_capture(self, common_attn_metadata: Common) -> M:
        """The metadata to capture a CUDA graph with; by default that of `build`."""
        built: M = self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)
        return built


def _by_keywords(build: Any) -> Any:
    """A method `build` that takes keywords only, for callers that pass positions; another as it
    is."""
    kinds = {parameter.kind for parameter in inspect.signature(build).parameters.values()}
    if inspect.Parameter.KEYWORD_ONLY not in kinds:
        return build

    @functools.wraps(build)
    def call(
        self: Any, common_prefix_len: int, common_attn_metadata: Common, fast_build: bool = False
    ) -> Any:
        given = {"common_attn_metadata": common_attn_metadata, "fast_build": fast_build}
        return build(self, common_prefix_len=common_prefix_len, **given)

    return call


def make_builder(
    backend: type[AttentionBackend], kv_cache_spec: Any, vllm_config: Any, device: Any, **more: Any
) -> Builder[Any]:
    """The builder of a backend from vLLM's arguments.

    Args:
        backend: the backend class.
        kv_cache_spec, vllm_config, device: as in `AttentionMetadataBuilder`, which gets these
            objects themselves.
        more: further arguments of the builder (`limits`, ...).
    """
    spec, builder_cls = spec_of(kv_cache_spec, vllm_config), backend.get_builder_cls()
    if not issubclass(builder_cls, AttentionMetadataBuilder):
        return backend.make_builder(spec, device, **more)
    given = {"kv_cache_spec": kv_cache_spec, "vllm_config": vllm_config}
    builder: Builder[Any] = builder_cls.create(
        spec, device, config={**backend.config, **given}, **more
    )
    return builder
