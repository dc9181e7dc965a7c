"""Stored keys and values of single tokens, copied between caches of one form without a rounding.

The bytes of a token are its elements in every view of the cache, and its scales in the page (M16).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnlib.cache.storage import PagedKVCache

__all__ = ["read_rows", "write_rows"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of the size of an element: torch indexes no tensors of float8."""


def _views(cache: PagedKVCache) -> list[Tensor]:
    views = list(cache.block_views)
    if cache.values_alias_keys:
        del views[1]
    return [view.view(_INTEGERS[view.element_size()]) for view in views]


def read_rows(cache: PagedKVCache, slots: Tensor) -> list[Tensor]:
    """What a cache stores for some tokens: one tensor `[n, Hkv, ...]` of integers per view.

    Args:
        cache: the cache.
        slots: `[n]` int64, all within the cache.
    """
    block, offset = slots // cache.block_size, slots % cache.block_size
    return [view[block, offset] for view in _views(cache)]


def write_rows(cache: PagedKVCache, rows: Sequence[Tensor], slots: Tensor) -> None:
    """Store rows that `read_rows` read from a cache of the same form.

    Args:
        cache: the cache.
        rows: of `read_rows`.
        slots: `[n]` int64, all within the cache. Of equal slots, any one row is stored.
    """
    block, offset = slots // cache.block_size, slots % cache.block_size
    for view, part in zip(_views(cache), rows, strict=True):
        view[block, offset] = part
