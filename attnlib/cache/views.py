"""The two views of a cache: their checks, the name of their layout, and their signature."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from attnlib.cache.layout import LAYOUTS
from attnlib.cache.overlap import blocks_overlap
from attnlib.errors import ContractError
from attnlib.ops.latent import values_are_prefix

__all__ = ["CacheSignature", "check_views", "recognized_layout"]


class CacheSignature:
    """Dtypes, shapes, strides, layout and scales of a cache; one object for equal ones."""

    __slots__ = ("__weakref__",)

    @staticmethod
    def of(facts: tuple[Any, ...]) -> CacheSignature:
        """The signature of caches with these facts."""
        return _signatures.setdefault(facts, CacheSignature())


_signatures: WeakValueDictionary[tuple[Any, ...], CacheSignature] = WeakValueDictionary()


def check_views(key: torch.Tensor, value: torch.Tensor) -> None:
    """Whether two views are the keys and values of one cache (P1).

    Raises:
        ContractError: another number of dimensions, sizes, dtypes or devices that disagree, or
            values in the memory of the keys that are no prefix of them.
    """
    for name, view in (("key_cache", key), ("value_cache", value)):
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
    if key.dtype != value.dtype or key.device != value.device:
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
