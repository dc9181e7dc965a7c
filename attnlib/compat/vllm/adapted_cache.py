"""Caches of vLLM's layers for attnlib, and of attnlib's for backends in vLLM's style."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlib.cache.layout import LAYOUTS
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec

__all__ = ["CacheForm", "paged_cache"]

_PROBE = (2, 7, 16, 3, 64)
"""Different sizes of the dimensions (K and V, blocks, tokens, heads, elements)."""


@dataclass(frozen=True)
class CacheForm:
    """The form of the cache of a backend.

    Attributes:
        backend: has `get_kv_cache_shape`.
        order: the dimension of `[2, B, N, H, D]` at each place of its shape.
        layout: the memory layout.
    """

    backend: Any
    order: tuple[int, ...]
    layout: str

    @classmethod
    def of(cls, backend: Any) -> CacheForm:
        """The form that a backend declares.

        Raises:
            ContractError: its shape is not a permutation of `[2, B, N, H, D]`, so that nothing else
                could read its cache, or no layout has its order.
        """
        shape = tuple(backend.get_kv_cache_shape(*_PROBE[1:]))
        if sorted(shape) != sorted(_PROBE):
            raise ContractError(
                f"the cache of {backend.__name__} has the shape {shape} for (2, blocks, tokens, "
                f"heads, elements) = {_PROBE}, which is not a permutation: run it in "
                "attnlib.compat.vllm.Attention, which passes the tensor on as it is"
            )
        order = tuple(_PROBE.index(size) for size in shape)
        try:
            in_memory = tuple(order[place] for place in backend.get_kv_cache_stride_order())
        except (AttributeError, NotImplementedError):  # optional: contiguous in its shape
            in_memory = order
        for layout in LAYOUTS.values():
            if layout.stride_order == in_memory:
                return cls(backend, order, layout.name)
        raise ContractError(
            f"the cache of {backend.__name__} has the shape {shape} for the sizes {_PROBE}, and "
            f"the order {in_memory} of these dimensions in memory, which is none of "
            f"{', '.join(LAYOUTS)}: state another get_kv_cache_stride_order"
        )

    def tensor(self, cache: PagedKVCache) -> torch.Tensor:
        """The memory of a cache in this form, without a copy.

        Raises:
            ContractError: keys and values are not two parts of one allocation.
        """
        key, value = cache.key_cache, cache.value_cache
        step = value.storage_offset() - key.storage_offset()
        same = key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        if not same or step < 0 or key.stride() != value.stride() or key.shape != value.shape:
            raise ContractError(
                f"the keys and values of this cache are not one tensor, which "
                f"{self.backend.__name__} reads: allocate it with PagedKVCache.allocate"
            )
        both = key.as_strided((2, *key.shape), (step, *key.stride()), key.storage_offset())
        return both.permute(self.order)


def paged_cache(tensor: torch.Tensor, spec: AttentionSpec, layer_name: str) -> PagedKVCache:
    """A tensor that an engine assigned to a layer as views, without a copy.

    Args:
        tensor: `[2, B, N, H, D]`, or latents `[B, N, D]`; uint8 holds the dtype of the spec.
        spec: of the layer.
        layer_name: for the message.

    Raises:
        ContractError: another shape.
    """
    if spec.use_mla and tensor.dim() == 3:  # the values are a prefix
        key = tensor.unsqueeze(2)
        return PagedKVCache.from_views(key, key[..., : spec.head_size_v])
    if tensor.dim() != 5 or tensor.shape[0] != 2:
        raise ContractError(
            f"kv_cache of layer {layer_name!r} has shape {tuple(tensor.shape)}; assign "
            "layer.kv_cache = [tensor] with the shape of attn_backend.get_kv_cache_shape, "
            "(2, blocks, block_size, num_kv_heads, head_size), or a PagedKVCache"
        )
    typed = tensor.view(spec.kv_dtype) if tensor.dtype == torch.uint8 else tensor
    return PagedKVCache.from_views(typed[0], typed[1])
