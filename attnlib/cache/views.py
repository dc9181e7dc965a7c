"""The two views of a cache: their checks, the name of their layout, and their signature."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from attnlib.cache.layout import LAYOUTS, layout_named
from attnlib.cache.overlap import blocks_overlap
from attnlib.errors import ContractError
from attnlib.ops.latent import values_are_prefix
from attnlib.spec import AttentionSpec

__all__ = ["CacheSignature", "allocated_views", "check_views", "recognized_layout"]


ViewSizes = tuple[torch.Size, tuple[int, ...], torch.Size, tuple[int, ...]]
"""Shape and strides of keys and of values."""


class CacheSignature:
    """Dtypes, shapes, strides, layout and scales of a cache; one object for equal ones.

    Attributes:
        views: what operations in place (`resize_`, `transpose_`) change of them: `sizes`.
        tokens_overlap: whether tokens share memory, as in expanded tensors; None if nobody asked.
    """

    __slots__ = ("__weakref__", "tokens_overlap", "views")

    def __init__(self, views: ViewSizes) -> None:
        self.views = views
        self.tokens_overlap: bool | None = None

    @staticmethod
    def sizes(key: torch.Tensor, value: torch.Tensor) -> ViewSizes:
        """Shape and strides of keys and of values."""
        return key.shape, key.stride(), value.shape, value.stride()

    @staticmethod
    def of(facts: tuple[Any, ...], views: ViewSizes) -> CacheSignature:
        """The signature of caches with these facts, which follow from `views` among others."""
        return _signatures.setdefault(facts, CacheSignature(views))


_signatures: WeakValueDictionary[tuple[Any, ...], CacheSignature] = WeakValueDictionary()


def check_views(key: torch.Tensor, value: torch.Tensor, one_dtype: bool = True) -> None:
    """Whether two views are the keys and values of one cache (P1), of one dtype or of two.

    Raises:
        ContractError: another number of dimensions, sizes, dtypes or devices that disagree, or
            values in the memory of the keys that are not a prefix of them.
    """
    for name, view in (("key_cache", key), ("value_cache", value)):
        if not isinstance(view, torch.Tensor):
            raise ContractError(
                f"{name} is a {type(view).__name__}; it must be a tensor [blocks, block_size, "
                "num_kv_heads, head_size]",
                rule="P1",
            )
        if view.dim() != 4:
            raise ContractError(
                f"{name} has shape {tuple(view.shape)}; it must be "
                f"[blocks, block_size, num_kv_heads, head_size]",
                rule="P1",
            )
        if view.stride(3) != 1 and view.shape[3] > 1:
            raise ContractError(
                f"{name} has last stride {view.stride(3)}; the last stride must be 1",
                rule="P1",
            )
    if key.shape[:3] != value.shape[:3]:
        raise ContractError(
            f"key_cache {tuple(key.shape)} and value_cache {tuple(value.shape)} must agree in "
            f"blocks, block_size and heads",
            rule="P1",
        )
    if (one_dtype and key.dtype != value.dtype) or key.device != value.device:
        raise ContractError(
            f"key_cache ({key.dtype}, {key.device}) and value_cache ({value.dtype}, "
            f"{value.device}) must agree in dtype and device",
            rule="P1",
        )
    if not values_are_prefix(key, value) and blocks_overlap(key, value):
        raise ContractError(
            "key_cache and value_cache overlap in each block, so values would overwrite keys: pass "
            "views of separate elements, or values that are a prefix of the keys (use_mla)",
            rule="P1",
        )


def recognized_layout(key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Name of the layout that has the strides of these views, or None."""
    sizes = (key.shape[0], key.shape[1], key.shape[2], key.shape[3], value.shape[3])
    for layout in LAYOUTS.values():
        k_strides, v_strides, _ = layout.strides(*sizes)
        if key.stride() == k_strides and value.stride() == v_strides:
            return layout.name
    return None


def allocated_views(
    spec: AttentionSpec, num_blocks: int, layout: str, device: torch.device | str | None
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Views of new memory, filled with zeros, and the name of their layout.

    Args:
        spec: heads, sizes, dtype and block size; without scales in the page.
        num_blocks: blocks in the pool.
        layout: name of a layout; latents have "NHD".
        device: None for torch's default device.

    Raises:
        LayoutMismatchError: an unknown layout.
    """
    order = layout_named(layout)
    sizes = (num_blocks, spec.block_size, spec.num_kv_heads)
    if spec.use_mla:
        # One latent vector per token: the value is a prefix of the key and aliases its memory.
        key = torch.zeros(*sizes, spec.head_size, dtype=spec.kv_dtype, device=device)
        return key, key[..., : spec.head_size_v], "NHD"
    k_strides, v_strides, v_offset = order.strides(*sizes, spec.head_size, spec.head_size_v)
    per_token = spec.num_kv_heads * (spec.head_size + spec.head_size_v)
    pool = torch.zeros(num_blocks * spec.block_size * per_token, dtype=spec.kv_dtype, device=device)
    key = pool.as_strided((*sizes, spec.head_size), k_strides)
    value = pool.as_strided((*sizes, spec.head_size_v), v_strides, v_offset)
    return key, value, order.name
