"""Backends in vLLM's style as backends of attnlib.

    attnlib.register_backend("mine", adapt_backend(MyVllmBackend))

The impl of such a backend is constructed from sizes (`impls`); its builder is a v1 builder, and may
build metadata of any class. It runs in layers of attnlib, over a `PagedKVCache`, with graphs and in
the conformance suite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from attnlib.backends._pairs.classes import make_pair
from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.capabilities import Capabilities, Sizes
from attnlib.compat.vllm.adapted_builder import AdaptedBuilder, AdaptedMetadata, builder_of
from attnlib.compat.vllm.adapted_cache import CacheForm
from attnlib.compat.vllm.impls import has_vllm_constructor, has_vllm_forward, run_impl
from attnlib.metadata.base import AttentionMetadata
from attnlib.spec import AttentionSpec, AttentionType, MaskKind

__all__ = ["AdaptedBackend", "adapt_backend"]


class AdaptedBackend(AttentionBackend):
    """Base of adapted backends; `adapt_backend` creates the classes.

    Attributes:
        source: the class that was adapted.
    """

    source: ClassVar[Any]
    builder_cls: ClassVar[type[AdaptedBuilder]]
    impl_cls: ClassVar[type[AdaptedImpl]]

    @classmethod
    def get_name(cls) -> str:
        return str(cls.source.get_name()).lower()

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[AdaptedBuilder]:
        return cls.builder_cls


class AdaptedImpl(AttentionImpl):
    """The impl of an adapted backend.

    Attributes:
        inner: the impl in vLLM's style.
        writes_keys: whether its `forward` is vLLM's, which gets keys and values and writes them.
    """

    source: ClassVar[Any]
    form: ClassVar[CacheForm]
    extra: ClassVar[Mapping[str, Any]]

    def __init__(self, spec: AttentionSpec, **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        impl_cls = self.source.get_impl_cls()
        self.inner = _make_impl(impl_cls, self, kwargs, self.extra)
        self.writes_keys = has_vllm_forward(impl_cls)

    def forward(
        self,
        query: torch.Tensor,
        cache: Any,
        metadata: AttentionMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward`; the inner impl gets no keys."""
        if self.writes_keys:
            self.run(query, None, None, cache, metadata, output)
        else:
            self.inner.forward(query, cache, metadata, output, lse)

    def forward_unpaged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `AttentionImpl.forward_unpaged`; the inner impl gets an empty cache."""
        if self.writes_keys:
            self.run(query, key, value, None, metadata, output)
        else:
            self.inner.forward_unpaged(query, key, value, metadata, output, lse)

    def write_kv(self, key: Any, value: Any, cache: Any, slot_mapping: Any) -> None:
        """See `AttentionImpl.write_kv`."""
        if isinstance(self.inner, AttentionImpl):
            self.inner.write_kv(key, value, cache, slot_mapping)
        else:
            super().write_kv(key, value, cache, slot_mapping)

    def plan(self, signature: Any, *call: Any) -> Any:
        """A call of the inner `forward`, which writes the keys itself."""
        metadata = call[4]
        if self.writes_keys:
            return _Plan(metadata)
        return self.inner.plan(signature, *call)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: Any,
        metadata: AttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Call the inner `forward`; tensors per head or flat."""
        spec = self.spec
        query = query.view(-1, spec.num_heads, spec.head_size)
        if key is not None and value is not None:
            key = key.view(-1, spec.num_kv_heads, spec.head_size)
            value = value.view(-1, spec.num_kv_heads, spec.head_size_v)
        tensor = query.new_empty(0) if cache is None else self.form.tensor(cache)
        built = metadata.built if isinstance(metadata, AdaptedMetadata) else metadata
        layer = _Scales(cache, query)
        output = output.view(-1, spec.num_heads, spec.head_size_v)
        output.zero_()  # rows of padding, which such an impl does not write (M6)
        run_impl(self.inner, layer, query, key, value, tensor, built, output)


class _Plan:
    """A step plan over one batch."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def run(
        self,
        impl: AdaptedImpl,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """See `StepPlan.run`."""
        impl.run(query, key, value, cache, self._metadata, output)


class _Scales:
    """What an impl reads of its layer."""

    def __init__(self, cache: Any, query: torch.Tensor) -> None:
        scales = (1.0, 1.0) if cache is None else (cache.k_scale, cache.v_scale)
        self._q_scale, self._k_scale, self._v_scale = (
            # No copy from the host, which a CUDA graph could not capture.
            scale if isinstance(scale, torch.Tensor) else torch.full((), scale, device=query.device)
            for scale in (1.0, *scales)
        )


def _make_impl(
    impl_cls: Any, outer: AttentionImpl, given: Mapping[str, Any], extra: Mapping[str, Any]
) -> Any:
    """An impl from the sizes of a spec."""
    spec, slopes, sinks = outer.spec, outer.alibi_slopes, outer.sinks
    impl = impl_cls.__new__(impl_cls)
    if isinstance(impl, AttentionImpl):  # its methods read what this constructor sets
        AttentionImpl.__init__(impl, spec, **given)
        if not has_vllm_constructor(impl_cls):
            impl_cls.__init__(impl, spec, **given)
            return impl
    impl.__init__(
        spec.num_heads,
        spec.head_size,
        outer.scale,
        spec.num_kv_heads,
        None if slopes is None else slopes.tolist(),
        spec.sliding_window,
        spec.kv_cache_dtype,
        spec.logits_soft_cap,
        spec.attn_type.value,
        outer.kv_sharing_target_layer_name,
        **extra,
        **({} if sinks is None else {"sinks": sinks}),
    )
    return impl


def adapt_backend(
    backend: Any, *, extra_impl_args: Mapping[str, Any] | None = None, **capabilities: Any
) -> type[AttentionBackend]:
    """A backend of attnlib from a backend in vLLM's style.

    Args:
        backend: has `get_name`, `get_impl_cls`, `get_kv_cache_shape`, and optionally a v1
            `get_builder_cls`, `get_kv_cache_stride_order` and `get_supported_head_sizes`. Without a
            builder the impl gets attnlib's `PagedMetadata`.
        extra_impl_args: further arguments of the impl's constructor.
        capabilities: fields of `attnlib.Capabilities`. vLLM's interface states head sizes, the
            layout and graphs only; without more, the backend supports causal decoder layers of
            float dtypes with caches in these, any block size and head ratio, on CPU and GPU, and
            no windows, soft caps, slopes or sinks.

    Raises:
        RegistrationError: a builder of vLLM v0, which needs a runner.
    """
    form, builder = CacheForm.of(backend), builder_of(backend)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    sizes = getattr(backend, "get_supported_head_sizes", None)
    stated = {
        "devices": ("cpu", "cuda"),
        "dtypes": dtypes,
        "kv_cache_dtypes": dtypes,
        "head_sizes": Sizes(minimum=1) if sizes is None else Sizes(exactly=tuple(sizes())),
        "block_sizes": Sizes(minimum=1),
        "kv_cache_layouts": (form.layout,),
        "group_sizes": Sizes(minimum=1),
        "attn_types": (AttentionType.DECODER,),
        "mask_kinds": (MaskKind.CAUSAL,),
        "cudagraph": builder["cudagraph_support"],
    }
    body = {
        "source": backend,
        "capabilities": Capabilities(**{**stated, **capabilities}),
        "description": f"{backend.__name__}, in vLLM's style",
        "__module__": __name__,
    }
    extra = dict(extra_impl_args or {})
    return make_pair(
        AdaptedBackend,
        body,
        (_adapted, (backend, extra, capabilities)),
        builder=(AdaptedBuilder, builder),
        impl=(AdaptedImpl, {"source": backend, "form": form, "extra": extra}),
    )


def _adapted(backend: Any, extra: Any, capabilities: Any) -> type[AttentionBackend]:
    return adapt_backend(backend, extra_impl_args=extra, **capabilities)
