"""A layout is an order in memory, never another shape (P2).

Every layout is a permutation of the logical shape `[2 (K, V), B blocks, N tokens, H heads, D elements]`, exactly what vLLM's
`get_kv_cache_stride_order` returns. The place of the K|V axis makes the difference: outermost gives two separate tensors, next to the blocks
gives one K page and one V page in turns, innermost but one packs `[K | V]` into the last dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from attnlib import env
from attnlib.errors import LayoutMismatchError

__all__ = [
    "LAYOUTS",
    "CacheLayout",
    "get_kv_cache_layout",
    "negotiate_layout",
    "set_kv_cache_layout",
]

_KV, _BLOCK, _TOKEN, _HEAD, _ELEMENT = range(5)


@dataclass(frozen=True)
class CacheLayout:
    """One order in memory.

    Attributes:
        name: how users write it.
        stride_order: for each physical dimension, outermost first, which logical dimension of `[2, B, N, H, D]` it is.
    """

    name: str
    stride_order: tuple[int, int, int, int, int]

    def strides(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, head_size_v: int
    ) -> tuple[_Strides, _Strides, int]:
        """Element strides of the K view and of the V view (each for `[B, N, H, D]`), and the offset at which V starts."""
        kv_at = self.stride_order.index(_KV)
        sizes = {_BLOCK: num_blocks, _TOKEN: block_size, _HEAD: num_kv_heads}
        inner = self.stride_order[kv_at + 1 :]
        inner_k, inner_v = (
            prod({**sizes, _ELEMENT: size}[axis] for axis in inner)
            for size in (head_size, head_size_v)
        )
        found: list[_Strides] = []
        for size in (head_size, head_size_v):
            strides, step = dict.fromkeys(range(1, 5), 0), 1
            for axis in reversed(self.stride_order):
                if axis == _KV:
                    step = inner_k + inner_v
                    continue
                strides[axis] = step
                step *= {**sizes, _ELEMENT: size}[axis]
            found.append((strides[_BLOCK], strides[_TOKEN], strides[_HEAD], strides[_ELEMENT]))
        return found[0], found[1], inner_k


_Strides = tuple[int, int, int, int]

LAYOUTS: dict[str, CacheLayout] = {
    layout.name: layout
    for layout in (
        CacheLayout("NHD", (_KV, _BLOCK, _TOKEN, _HEAD, _ELEMENT)),
        CacheLayout("HND", (_KV, _BLOCK, _HEAD, _TOKEN, _ELEMENT)),
        CacheLayout("NHD_INTERLEAVED", (_BLOCK, _KV, _TOKEN, _HEAD, _ELEMENT)),
        CacheLayout("HND_INTERLEAVED", (_BLOCK, _KV, _HEAD, _TOKEN, _ELEMENT)),
        CacheLayout("NHD_PACKED", (_BLOCK, _TOKEN, _HEAD, _KV, _ELEMENT)),
        CacheLayout("HND_PACKED", (_BLOCK, _HEAD, _TOKEN, _KV, _ELEMENT)),
    )
}

_override: str | None = None


def layout_named(name: str) -> CacheLayout:
    """The layout of that name.

    Raises:
        LayoutMismatchError: no such layout; the message lists them.
    """
    try:
        return LAYOUTS[name.upper()]
    except KeyError:
        raise LayoutMismatchError(
            f"kv_cache_layout={name!r} is not known; use one of {', '.join(LAYOUTS)}"
        ) from None


def set_kv_cache_layout(layout: str | None) -> None:
    """Override the layout of every later `PagedKVCache.allocate` that names none; None takes the override back. Wins over the environment."""
    global _override
    _override = None if layout is None else layout_named(layout).name


def get_kv_cache_layout() -> str | None:
    """The layout that the user insists on: `set_kv_cache_layout`, else `ATTNLIB_KV_CACHE_LAYOUT`, else None (nobody insists)."""
    return _override or env.read("ATTNLIB_KV_CACHE_LAYOUT") or None


def negotiate_layout(demands: Sequence[tuple[str, Sequence[str]]], wish: str | None = None) -> str:
    """One layout that everyone reads.

    Args:
        demands: (who, layouts that it reads, best first) for each layer or backend; "ANY" among the layouts reads them all.
        wish: a layout that the user insists on.

    Returns:
        `wish` if everyone reads it, else the common layout that the first demand puts first, "NHD" if all read any.

    Raises:
        LayoutMismatchError: there is no common layout; the message names everyone's demand.
    """
    common = [
        name for name in LAYOUTS if all("ANY" in reads or name in reads for _, reads in demands)
    ]
    if wish is not None:
        common = [name for name in common if name == layout_named(wish).name]
    if not common:
        named = "; ".join(f"{who} reads {', '.join(reads)}" for who, reads in demands)
        insisted = f"the cache was asked to be {wish}, but " if wish else ""
        raise LayoutMismatchError(
            f"no common KV-cache layout: {insisted}{named}. Choose backends that share one, or convert between caches."
        )
    preferred = [name for _, reads in demands for name in reads if name in common]
    return preferred[0] if preferred else common[0]
