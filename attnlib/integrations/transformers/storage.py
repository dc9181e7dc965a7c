"""The storage of one layer in the paged cache of transformers, in its two formats.

Up to transformers 5.17 the layers of a group have tensors `[slots, Hkv, D]`, indices count slots,
and an attribute of the cache holds the windows. Since 5.18 one flat tensor holds alternating pages
of keys and values, and an allocator per layer type computes the views. Both formats are two strided
views and integer slots, which is what `LayerStorage` holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.integrations.transformers.layers import Call

__all__ = ["LayerStorage", "attention_layers", "layer_storage", "sliding_update"]


@dataclass(frozen=True, eq=False)
class LayerStorage:
    """The storage of one layer in the paged cache.

    Attributes:
        group: index of the layer's read index, write index and block table.
        layer_type: "full_attention" or "sliding_attention".
        pages: the layer's keys and values in pages; None for a sliding layer without block tables
            (`ring_allocator`).
        window: W of a sliding layer, which has a ring of pages: a query sees W keys, including its
            own.
    """

    group: int
    layer_type: str
    pages: PagedKVCache | None
    window: int | None = None

    def key_starts(self, kwargs: dict[str, Any]) -> torch.Tensor:
        """`[R+1]` int32; offsets of the requests in the gathered keys."""
        starts = kwargs["cu_seq_lens_k"]
        chosen: torch.Tensor = starts[self.layer_type] if isinstance(starts, dict) else starts
        return chosen.to(torch.int32)

    def table(self, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """`[R, M]` int32 block table of a step of decodes, as the allocator of the layer filled it;
        None for other steps."""
        tables = kwargs.get("block_table")
        return None if tables is None else tables[self.group]

    def longest(self, kwargs: dict[str, Any]) -> int:
        """Upper bound on the number of keys of a request."""
        longest = kwargs["max_length_k"] if "max_length_k" in kwargs else kwargs["max_seqlen_k"]
        return int(longest[self.layer_type] if isinstance(longest, dict) else longest)


_storages: WeakKeyDictionary[Any, dict[int, LayerStorage]] = WeakKeyDictionary()


def layer_storage(cache: Any, layer_idx: int) -> LayerStorage:
    """The storage of a layer in a `PagedAttentionCache`; determined once per cache and layer."""
    known = _storages.setdefault(cache, {})
    if layer_idx not in known:
        find = _by_allocator if hasattr(cache, "layer_to_allocator") else _by_group
        known[layer_idx] = find(cache, layer_idx)
    return known[layer_idx]


def attention_layers(cache: Any) -> frozenset[int]:
    """Indices of the layers that a `PagedAttentionCache` stores."""
    if hasattr(cache, "layer_to_allocator"):
        return frozenset(cache.layer_to_allocator)
    return frozenset(cache.layer_index_to_group_indices)


def sliding_update(
    cache: Any, call: Call, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store the new keys and values of a sliding layer and gather those in its window.

    Returns:
        (keys `[1, Hkv, S, D]`, values `[1, Hkv, S, Dv]`).
    """
    # Of the class: during a step, `check_layers` replaces the method of the cache.
    update = type(cache).update
    if hasattr(cache, "layer_to_allocator"):
        # The cache replaces values in this dict that other layers still need.
        keys, values = update(
            cache,
            key_states=call.key,
            value_states=call.value,
            layer_idx=call.layer_idx,
            kwargs=dict(kwargs),
        )
        return keys, values
    keys, values = update(
        cache,
        key_states=call.key,
        value_states=call.value,
        layer_idx=call.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)


def _by_allocator(cache: Any, layer_idx: int) -> LayerStorage:
    allocator = cache.layer_to_allocator[layer_idx]
    paged = allocator.supports_block_table
    pages = PagedKVCache.from_transformers(cache, layer_idx) if paged else None
    window = getattr(allocator, "sliding_window", None)
    return LayerStorage(allocator.index, allocator.layer_type, pages, window)


def _by_group(cache: Any, layer_idx: int) -> LayerStorage:
    group, _ = cache.layer_index_to_group_indices[layer_idx]
    window = cache.sliding_windows[layer_idx]
    if window != 1:  # 1 means no window in this version
        return LayerStorage(group, "sliding_attention", None, window)
    pages = PagedKVCache.from_transformers(cache, layer_idx)
    return LayerStorage(group, "full_attention", pages)
