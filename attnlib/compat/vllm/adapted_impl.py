"""The impl of an adapted backend: vLLM's impl behind attnlib's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from attnlib.backends.base import AttentionImpl
from attnlib.compat.vllm.adapted_builder import AdaptedMetadata
from attnlib.compat.vllm.adapted_cache import CacheForm
from attnlib.compat.vllm.impls import has_vllm_constructor, has_vllm_forward, run_impl
from attnlib.metadata.base import AttentionMetadata
from attnlib.spec import AttentionSpec

__all__ = ["AdaptedImpl"]


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
            self.inner.forward(query, cache, _built(metadata), output, lse)

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
            self.inner.forward_unpaged(query, key, value, _built(metadata), output, lse)

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
        if isinstance(metadata, AdaptedMetadata):
            return None
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
        layer, built = _Scales(cache, query), _built(metadata)
        output = output.view(-1, spec.num_heads, spec.head_size_v)
        output.zero_()  # rows of padding, which such an impl does not write (M6)
        run_impl(self.inner, layer, query, key, value, tensor, built, output)


def _built(metadata: AttentionMetadata) -> object:
    """What the builder of the source built."""
    return metadata.built if isinstance(metadata, AdaptedMetadata) else metadata


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
            scale
            if isinstance(scale, torch.Tensor)
            else torch.full((), scale, dtype=torch.float32, device=query.device)
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
