"""`vllm.attention.layer`: a layer that owns its cache and reads the batch from the forward context.

Differences from `attnlib.Attention`, all as in vLLM: the constructor takes the layer's sizes; the
cache is the attribute `kv_cache`; the batch comes from `set_forward_context`; without metadata
(profiling runs) the output is 0. A backend in vLLM's style runs directly: its impl is constructed
from sizes and gets the layer, keys and values, the tensor of the cache and any metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from attnlib.backends.base import AttentionBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.compat.vllm.adapted_cache import paged_cache
from attnlib.compat.vllm.adapter import adapt_backend
from attnlib.compat.vllm.direct_layer import DirectLayer
from attnlib.compat.vllm.extra_arguments import LAYER_ARGUMENTS, layer_arguments
from attnlib.compat.vllm.forward_context import get_forward_context
from attnlib.compat.vllm.impls import has_vllm_constructor, has_vllm_forward, impl_class_of
from attnlib.layer import Attention as Layer
from attnlib.layer.metadata_checks import check_metadata_type
from attnlib.metadata.batch_metadata import AttentionMetadata as Metadata
from attnlib.spec import AttentionType

__all__ = ["Attention"]


class Attention(nn.Module):
    """One attention layer with vLLM's arguments.

    Args:
        num_heads: query heads of this rank.
        head_size: elements of one head.
        scale: softmax scale.
        num_kv_heads: key and value heads; None means `num_heads`.
        alibi_slopes: one slope per query head.
        cache_config: an object with `block_size`, `cache_dtype` and `calculate_kv_scales`; None
            means blocks of 16 in the dtype of the model.
        quant_config: an object with `get_quant_method(layer, prefix)`, whose result creates the
            parameters of KV scales (`create_weights(layer)`) that the checkpoint fills.
        logits_soft_cap: soft cap of the scores; None or 0 for none.
        per_layer_sliding_window: number of visible keys, the query's own included.
        use_mla: multi-head latent attention; queries and keys are latent.
        prefix: name of the layer.
        attn_type: an `AttentionType`.
        kv_sharing_target_layer_name: the layer whose cache this one reads.
        attn_backend: the backend; None selects one. A class in vLLM's style need not derive from
            attnlib's.
        extra_impl_args: for a backend in vLLM's style all of them go to its impl. Else `sinks`,
            `kv_lora_rank` and the other sizes of multi-head latent attention, `dtype`, `device`,
            and fields of `AttentionSpec`.

    Attributes:
        kv_cache: one cache per virtual engine, assigned by the engine: a tensor of the shape of
            `attn_backend.get_kv_cache_shape`, for latent attention `[B, N, D]`, or a
            `PagedKVCache`. Empty tensors at first.
        attn_backend: the backend class.
        impl: the implementation of the backend for this layer.
        kv_sharing_target_layer_name: as given.
        layer: the `attnlib.Attention` that runs, or the `DirectLayer` of a backend in vLLM's style.

    Raises:
        TypeError: an extra argument that no implementation has.
        UnsupportedConfigError: no backend supports the layer.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        cache_config: Any = None,
        quant_config: Any = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        use_mla: bool = False,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER.value,
        kv_sharing_target_layer_name: str | None = None,
        attn_backend: type[AttentionBackend] | None = None,
        **extra_impl_args: Any,
    ) -> None:
        super().__init__()
        heads = (num_heads, head_size, scale, num_kv_heads or num_heads, alibi_slopes)
        stored = getattr(cache_config, "cache_dtype", "auto")
        roles = (attn_type, kv_sharing_target_layer_name)
        impl_cls = impl_class_of(attn_backend)
        self.layer: Any
        if impl_cls is not None and has_vllm_forward(impl_cls):
            more: tuple[Any, ...] = (per_layer_sliding_window, stored, logits_soft_cap)
            impl = impl_cls(*heads, *more, *roles, **extra_impl_args)
            self.layer = DirectLayer(attn_backend, impl, stored, num_heads, heads[3], head_size)
        else:
            backend, own = attn_backend, extra_impl_args
            if impl_cls is not None and has_vllm_constructor(impl_cls):
                own = {name: x for name, x in own.items() if name in LAYER_ARGUMENTS}
                for_impl = {name: x for name, x in extra_impl_args.items() if name not in own}
                backend = adapt_backend(attn_backend, extra_impl_args=for_impl)
            more = (cache_config, None, logits_soft_cap, per_layer_sliding_window, use_mla, prefix)
            make: Any = Layer.from_arguments
            self.layer = make(*heads, *more, *roles, backend, **layer_arguments(own))
        self.impl = getattr(self.layer.impl, "inner", self.layer.impl)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        given = impl_cls is not None  # else selected, perhaps by a name
        self.attn_backend: Any = attn_backend if given else self.layer.backend
        self.kv_cache: list[torch.Tensor | PagedKVCache] = [
            torch.empty(0, dtype=torch.float32, device="cpu")
        ]
        self.calculate_kv_scales = bool(getattr(cache_config, "calculate_kv_scales", False))
        self.layer_name = prefix
        self._wrapped: tuple[torch.Tensor, PagedKVCache] | None = None
        for name in ("_q_scale", "_k_scale", "_v_scale"):  # what impls in vLLM's style read
            self.register_buffer(
                name, torch.ones((), dtype=torch.float32, device=None), persistent=False
            )
        self.quant_method = None
        if quant_config is not None:
            self.quant_method = quant_config.get_quant_method(self, prefix=prefix)
        if self.quant_method is not None and hasattr(self.quant_method, "create_weights"):
            self.quant_method.create_weights(self)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output_shape: torch.Size | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values to `kv_cache`, then attend.

        Args:
            query: `[T, Hq * D]` or `[T, Hq, D]`.
            key: `[T, Hkv * D]` or `[T, Hkv, D]`; None where the cache holds it already.
            value: `[T, Hkv * Dv]` or `[T, Hkv, Dv]`; None with `key`.
            output_shape: shape of the result; None means `[T, Hq * Dv]`.

        Returns:
            The output; zeros if the forward context has no metadata.

        Raises:
            ContractError: no forward context is set, or a tensor does not fit the layer, the cache
                or the batch.
        """
        context = get_forward_context()
        metadata = context.metadata_of(self.layer_name)
        shape = (query.shape[0], self._width) if output_shape is None else tuple(output_shape)
        if metadata is None:
            return torch.zeros(shape, dtype=query.dtype, device=query.device)
        if not isinstance(self.layer, DirectLayer):
            return self._attend(query, key, value, context.virtual_engine, metadata).view(shape)
        if self.calculate_kv_scales and metadata.enable_kv_scales_calculation:
            if key is not None and value is not None:
                self.calc_kv_scales(query, key, value)
        kv_cache = self.kv_cache[context.virtual_engine]
        return self.layer.attend(self, query, key, value, kv_cache, metadata, shape)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        virtual_engine: int,
        metadata: Metadata,
    ) -> torch.Tensor:
        """The output of a layer of attnlib."""
        spec = self.layer.spec
        if not isinstance(metadata, Metadata):
            check_metadata_type(self.layer, metadata)  # raises
        if spec.attn_type is AttentionType.ENCODER_DECODER:
            metadata = metadata.cross_attention or metadata
        if metadata.enable_kv_scales_calculation and not self.calculate_kv_scales:
            metadata = dataclasses.replace(metadata, enable_kv_scales_calculation=False)
        cache = self._cache(virtual_engine) if spec.is_paged else None
        heads = query.view(query.shape[0], spec.num_heads, spec.head_size)
        output: torch.Tensor = self.layer(heads, key, value, cache, metadata)
        if self.calculate_kv_scales and metadata.enable_kv_scales_calculation:
            self.calculate_kv_scales = False  # once, as in vLLM
        return output

    @property
    def _width(self) -> int:
        """Elements of the output of one token."""
        layer = self.layer
        if isinstance(layer, DirectLayer):
            return layer.width
        width: int = layer.spec.num_heads * layer.spec.head_size_v
        return width

    def calc_kv_scales(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Scales from the largest elements of `key` and `value`; see `attnlib.Attention`."""
        if isinstance(self.layer, DirectLayer):
            self._k_scale, self._v_scale = self.layer.scales_of(key, value)
        else:
            self.layer.calc_kv_scales(query, key, value)
        self.calculate_kv_scales = False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Use the KV scales that a checkpoint stored in `k_scale` and `v_scale`.

        A scale that is not positive was not in the checkpoint; a single one holds for both. A cache
        that is not quantized, or has its scales in the page, needs none.
        """
        if hasattr(self.impl, "process_weights_after_loading"):
            self.impl.process_weights_after_loading(act_dtype)
        given, layer = {}, self.layer
        needed = isinstance(layer, DirectLayer) or (
            layer.spec.is_kv_quantized and not layer.spec.scales_in_page
        )
        for name in ("k_scale", "v_scale") if needed else ():
            scale = getattr(self, name, None)
            if isinstance(scale, torch.Tensor) and float(scale) > 0:
                given[name] = float(scale)
        for name in ("k_scale", "v_scale") if given else ():
            scale = given.get(name, next(iter(given.values())))
            if isinstance(self.layer, DirectLayer):
                getattr(self, f"_{name}").fill_(scale)
            else:
                setattr(self.layer, name, scale)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that this layer runs on."""
        backend: type[AttentionBackend] = self.attn_backend
        return backend

    def extra_repr(self) -> str:
        """Sizes, scale and backend, for `print(model)`."""
        text: str = self.layer.extra_repr()
        return text

    def _cache(self, virtual_engine: int) -> PagedKVCache:
        """The cache of an engine; a tensor is wrapped once."""
        found = self.kv_cache[virtual_engine]
        if isinstance(found, PagedKVCache):
            return found
        if self._wrapped is None or self._wrapped[0] is not found:
            self._wrapped = (found, paged_cache(found, self.layer.spec, self.layer_name))
        return self._wrapped[1]
