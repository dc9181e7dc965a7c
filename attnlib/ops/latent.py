"""Latent caches (P10): values that are a prefix of the keys, in the same memory."""

from __future__ import annotations

from torch import Tensor

__all__ = ["values_are_prefix"]


def values_are_prefix(key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether each value is the beginning of its key in memory.

    Operations then load keys and values at once, and write the keys only.

    Args:
        key_cache: `[B, N, Hkv, D]`.
        value_cache: `[B, N, Hkv, Dv]`.
    """
    return (
        value_cache.data_ptr() == key_cache.data_ptr()
        and value_cache.stride()[:-1] == key_cache.stride()[:-1]
        and value_cache.shape[-1] <= key_cache.shape[-1]
    )
