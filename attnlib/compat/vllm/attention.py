"""vLLM's attention layer: it owns its cache and reads the batch from the forward context.

Differences from `attnlib.Attention`, all as in vLLM: the constructor takes the layer's sizes; the
cache is the attribute `kv_cache`; the batch comes from `set_forward_context`; without metadata
(profiling runs) the output is 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.compat.vllm.forward_context import get_forward_context
from attnlib.errors import ContractError
from attnlib.layer import Attention as Layer
from attnlib.spec import AttentionSpec, AttentionType

__all__ = ["Attention"]

_SPEC_FIELDS = {field.name for field in dataclasses.fields(AttentionSpec)}
_LATENT_SIZES = (
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
)
"""Sizes of multi-head latent attention that vLLM passes, but attention itself does not need."""


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
        attn_backend: the backend; None selects one.
        extra_impl_args: `sinks`, `kv_lora_rank` and the other sizes of multi-head latent attention,
            `dtype`, `device`, and fields of `AttentionSpec`.

    Attributes:
        kv_cache: one cache per virtual engine, assigned by the engine: a tensor of the shape of
            `attn_backend.get_kv_cache_shape`, for latent attention `[B, N, D]`, or a
            `PagedKVCache`. Empty tensors at first.
        attn_backend: the backend class.
        impl: the implementation of the backend for this layer.
        kv_sharing_target_layer_name: as given.

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
        self.layer = Layer.from_arguments(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            cache_config,
            None,
            logits_soft_cap,
            per_layer_sliding_window,
            use_mla,
            prefix,
            attn_type,
            kv_sharing_target_layer_name,
            attn_backend,
            **_layer_arguments(extra_impl_args),
        )
        self.kv_cache: list[torch.Tensor | PagedKVCache] = [torch.empty(0)]
        self.calculate_kv_scales = bool(getattr(cache_config, "calculate_kv_scales", False))
        self.layer_name = prefix
        self._wrapped: tuple[torch.Tensor, PagedKVCache] | None = None
        self.quant_method = None
        if quant_config is not None:
            self.quant_method = quant_config.get_quant_method(self, prefix=prefix)
        if self.quant_method is not None and hasattr(self.quant_method, "create_weights"):
            self.quant_method.create_weights(self)

    @property
    def attn_backend(self) -> type[AttentionBackend]:
        """The backend class."""
        return self.layer.backend

    @property
    def impl(self) -> AttentionImpl:
        """The implementation of the backend for this layer."""
        return self.layer.impl

    @property
    def kv_sharing_target_layer_name(self) -> str | None:
        """The layer whose cache this one reads."""
        return self.layer.kv_sharing_target_layer_name

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
        spec, context = self.layer.spec, get_forward_context()
        metadata = context.metadata_of(self.layer_name)
        heads = query.view(query.shape[0], spec.num_heads, spec.head_size)
        width = spec.num_heads * spec.head_size_v
        shape = (query.shape[0], width) if output_shape is None else tuple(output_shape)
        if metadata is None:
            return torch.zeros(shape, dtype=query.dtype, device=query.device)
        if spec.attn_type is AttentionType.ENCODER_DECODER:
            metadata = getattr(metadata, "cross_attention", None) or metadata
        if metadata.enable_kv_scales_calculation and not self.calculate_kv_scales:
            metadata = dataclasses.replace(metadata, enable_kv_scales_calculation=False)
        cache = self._cache(context.virtual_engine) if spec.is_paged else None
        output = self.layer(heads, key, value, cache, metadata)
        if self.calculate_kv_scales and metadata.enable_kv_scales_calculation:
            self.calculate_kv_scales = False  # once, as in vLLM
        result: torch.Tensor = output.view(shape)
        return result

    def calc_kv_scales(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Scales from the largest elements of `key` and `value`; see `attnlib.Attention`."""
        self.layer.calc_kv_scales(query, key, value)
        self.calculate_kv_scales = False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Use the KV scales that a checkpoint stored in `k_scale` and `v_scale`.

        A scale that is not positive was not in the checkpoint; a single one holds for both.
        """
        given = {}
        for name in ("k_scale", "v_scale"):
            scale = getattr(self, name, None)
            if isinstance(scale, torch.Tensor) and float(scale) > 0:
                given[name] = float(scale)
        for name in ("k_scale", "v_scale") if given else ():
            setattr(self.layer, name, given.get(name, next(iter(given.values()))))

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that this layer runs on."""
        return self.layer.backend

    def extra_repr(self) -> str:
        """Sizes, scale and backend, for `print(model)`."""
        return self.layer.extra_repr()

    def _cache(self, virtual_engine: int) -> PagedKVCache:
        """The cache of an engine; a tensor is wrapped once."""
        found = self.kv_cache[virtual_engine]
        if isinstance(found, PagedKVCache):
            return found
        if self._wrapped is None or self._wrapped[0] is not found:
            spec = self.layer.spec
            if spec.use_mla and found.dim() == 3:  # latents [B, N, D], whose prefix is the value
                key = found.unsqueeze(2)
                latent = PagedKVCache.from_views(key, key[..., : spec.head_size_v])
                self._wrapped = (found, latent)
                return latent
            if found.dim() != 5 or found.shape[0] != 2:
                raise ContractError(
                    f"kv_cache of layer {self.layer_name!r} has shape {tuple(found.shape)}; assign "
                    "layer.kv_cache = [tensor] with the shape of attn_backend.get_kv_cache_shape, "
                    "(2, blocks, block_size, num_kv_heads, head_size), or a PagedKVCache"
                )
            typed = found.view(spec.kv_dtype) if found.dtype == torch.uint8 else found
            self._wrapped = (found, PagedKVCache.from_views(typed[0], typed[1]))
        return self._wrapped[1]


def _layer_arguments(extra: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Attention.from_arguments` for vLLM's extra arguments."""
    accepted = _SPEC_FIELDS | {"sinks", "device"}
    sizes = {name: extra.pop(name) for name in _LATENT_SIZES if name in extra}
    latent = extra.pop("kv_lora_rank", None)
    if latent is not None:
        extra["head_size_v"] = latent
    elif sizes:
        raise TypeError(f"{', '.join(sizes)} need kv_lora_rank, the size of the latent values")
    unknown = [name for name in extra if name not in accepted]
    if unknown:
        raise TypeError(
            f"Attention got unexpected arguments {', '.join(unknown)}; extra arguments are sinks, "
            f"kv_lora_rank, {', '.join(_LATENT_SIZES)}, device and the fields of AttentionSpec"
        )
    return extra
