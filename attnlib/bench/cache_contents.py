"""Random contents of the caches of a case, and their copies."""

from __future__ import annotations

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.ops.torch.cache_write import write_kv
from attnlib.spec import AttentionSpec

__all__ = ["copy_of", "random_cache", "random_tokens", "write"]

_FILLED_SLOTS = 1 << 15
"""Slots that are filled at a time, whose tokens take a few hundred MB in float32."""


def _layout(spec: AttentionSpec) -> str | None:
    """The layout of the caches; None is the default of pages that hold their scales."""
    return None if spec.scales_in_page else "NHD"


def _stored(cache: PagedKVCache) -> tuple[torch.Tensor, ...]:
    """The views that hold the contents: of latents, the keys."""
    return cache.block_views[:1] if cache.values_alias_keys else cache.block_views


def random_tokens(
    count: int, spec: AttentionSpec, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys `[count, Hkv, D]` and values `[count, Hkv, Dv]`."""
    heads = spec.num_kv_heads
    key, value = (
        torch.randn(count, heads, size, generator=draw, device=draw.device).to(spec.dtype)
        for size in (spec.head_size, spec.head_size_v)
    )
    return key, value


def write(cache: PagedKVCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store tokens by the reference operation."""
    write_kv(
        key,
        value,
        cache.key_cache,
        cache.value_cache,
        slots,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        k_format=cache.page_formats[0],
        v_format=cache.page_formats[1],
        rotation=cache.rotation,
    )


def _fill_pages(cache: PagedKVCache, spec: AttentionSpec, draw: torch.Generator) -> None:
    """Store random tokens in all slots."""
    for first in range(0, cache.num_slots, _FILLED_SLOTS):
        slots = torch.arange(first, min(first + _FILLED_SLOTS, cache.num_slots))
        write(cache, *random_tokens(len(slots), spec, draw), slots.to(cache.device))


def _fill(view: torch.Tensor, dtype: torch.dtype, draw: torch.Generator) -> None:
    if view.dtype == dtype:
        view.normal_(generator=draw)
        return
    drawn = torch.randn(view.shape, generator=draw, device=view.device, dtype=torch.float32).to(
        view.dtype
    )
    view.view(torch.uint8).copy_(drawn.view(torch.uint8))


def random_cache(spec: AttentionSpec, num_blocks: int, draw: torch.Generator) -> PagedKVCache:
    """A cache with random contents in every slot."""
    cache = PagedKVCache.allocate(spec, num_blocks, draw.device, _layout(spec))
    if cache.page_format is None:
        for view in _stored(cache):
            _fill(view, spec.dtype, draw)
    else:
        _fill_pages(cache, spec, draw)
    return cache


def copy_of(cache: PagedKVCache, spec: AttentionSpec, device: torch.device) -> PagedKVCache:
    """A cache with equal contents."""
    copy = PagedKVCache.allocate(spec, cache.num_blocks, device, _layout(spec))
    for source, target in zip(_stored(cache), _stored(copy), strict=True):
        if source.element_size() == 1:
            source, target = source.view(torch.uint8), target.view(torch.uint8)
        target.copy_(source)
    return copy
