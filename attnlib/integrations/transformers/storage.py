"""Where transformers' paged cache keeps one layer, in both forms that it has had.

Up to transformers 5.17 a layer group shares plain tensors `[slots, Hkv, D]`, indices count slots, and an attribute says the window. Later, one flat
tensor holds pages of keys and values in turn, each layer sees it shifted by its place, and an allocator per layer type knows the rest. Both say the
same with two strided views and integer slots, which is what `LayerStorage` holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.integrations.transformers.layers import Call

__all__ = ["LayerStorage", "layer_storage", "sliding_update"]


@dataclass(frozen=True, eq=False)
class LayerStorage:
    """One layer's place in the paged cache.

    Attributes:
        group: which read and write index, and which block table, is this layer's.
        layer_type: transformers' name of its attention, "full_attention" or "sliding_attention".
        pages: the layer's keys and values in pages; None for a sliding layer, whose rolling buffer no block table describes.
    """

    group: int
    layer_type: str
    pages: PagedKVCache | None

    def key_starts(self, kwargs: dict[str, Any]) -> torch.Tensor:
        """[R+1] int32; where each request's keys start in what the cache would gather."""
        starts = kwargs["cu_seq_lens_k"]
        chosen: torch.Tensor = starts[self.layer_type] if isinstance(starts, dict) else starts
        return chosen.to(torch.int32)

    def longest(self, kwargs: dict[str, Any]) -> int:
        """Keys of the longest request; an upper bound."""
        longest = kwargs["max_length_k"] if "max_length_k" in kwargs else kwargs["max_seqlen_k"]
        return int(longest[self.layer_type] if isinstance(longest, dict) else longest)


_storages: WeakKeyDictionary[Any, dict[int, LayerStorage]] = WeakKeyDictionary()


def layer_storage(cache: Any, layer_idx: int) -> LayerStorage:
    """The place of a layer in transformers' `PagedAttentionCache`; found once per cache and layer."""
    known = _storages.setdefault(cache, {})
    if layer_idx not in known:
        find = _by_allocator if hasattr(cache, "layer_to_allocator") else _by_group
        known[layer_idx] = find(cache, layer_idx)
    return known[layer_idx]


def sliding_update(
    cache: Any, call: Call, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the cache store a sliding layer's new keys and gather those in the window: both `[1, Hkv, keys, D]`."""
    if hasattr(cache, "layer_to_allocator"):
        # The cache writes into the dict that it is given: other layers still need what it replaces.
        keys, values = cache.update(
            key_states=call.key,
            value_states=call.value,
            layer_idx=call.layer_idx,
            kwargs=dict(kwargs),
        )
        return keys, values
    keys, values = cache.update(
        key_states=call.key,
        value_states=call.value,
        layer_idx=call.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)


def _by_allocator(cache: Any, layer_idx: int) -> LayerStorage:
    allocator = cache.layer_to_allocator[layer_idx]
    pages = (
        PagedKVCache(*allocator.get_cache_for_block_table(layer_idx))
        if allocator.supports_block_table
        else None
    )
    return LayerStorage(allocator.index, allocator.layer_type, pages)


def _by_group(cache: Any, layer_idx: int) -> LayerStorage:
    group, place = cache.layer_index_to_group_indices[layer_idx]
    if cache.sliding_windows[layer_idx] != 1:  # 1 is how that version says "no window"
        return LayerStorage(group, "sliding_attention", None)
    keys, values = (
        states[place].view(-1, cache.block_size, *states[place].shape[1:])
        for states in (cache.key_cache, cache.value_cache)
    )
    return LayerStorage(group, "full_attention", PagedKVCache(keys, values))
