"""Packed tensors keep their elements, strides and shared memory."""

from __future__ import annotations

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.testing.tensor_io import (
    pack_cache_views,
    pack_tensor,
    unpack_cache_views,
    unpack_tensor,
)


def test_strides_are_preserved() -> None:
    base = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
    for view in (base, base.transpose(0, 1), base[:, ::2], base[1:, :, 1:3], base[:0]):
        restored = unpack_tensor(pack_tensor(view), "cpu")
        assert restored.stride() == view.stride()
        assert torch.equal(restored, view)


def test_aliased_views_stay_aliased() -> None:
    """MLA: the value is a prefix of the key."""
    key = torch.randn(4, 2, 1, 8)
    cache = PagedKVCache.from_views(key, key[..., :6])
    restored_key, restored_value = unpack_cache_views(
        pack_cache_views(cache.key_cache, cache.value_cache, torch.tensor([3, 1])), "cpu"
    )
    assert torch.equal(restored_key, key[[3, 1]])
    assert restored_value.data_ptr() == restored_key.data_ptr()
