"""Cache layouts: a layout is an order of dimensions in memory, never another shape (P2).

Every layout is a permutation of the logical shape `[2 (K, V), B blocks, N tokens, H heads, D
elements]`, as returned by `get_kv_cache_stride_order` in vLLM. The position of the K|V axis
distinguishes them: outermost gives two separate tensors, next to the blocks alternates K pages and
V pages, and next to the elements packs `[K | V]` into the last dimension.
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
    "kv_cache_layout_override",
    "negotiate_layout",
    "set_kv_cache_layout",
]

_KV, _BLOCK, _TOKEN, _HEAD, _ELEMENT = range(5)


@dataclass(frozen=True)
class CacheLayout:
    """One memory layout.

    Attributes:
        name: the name that users give.
        stride_order: the logical dimension of `[2, B, N, H, D]` at each physical position, the
            outermost first.
    """

    name: str
    stride_order: tuple[int, int, int, int, int]

    def strides(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, head_size_v: int
    ) -> tuple[_Strides, _Strides, int]:
        """Strides of the two views in elements.

        Returns:
            (strides of K `[B, N, H, D]`, strides of V `[B, N, H, Dv]`, offset of V).
        """
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
    """The layout with a name, in upper or lower case.

    Raises:
        LayoutMismatchError: the name is unknown; the message lists the known names.
    """
    try:
        return LAYOUTS[name.upper()]
    except (AttributeError, KeyError):
        raise LayoutMismatchError(
            f"kv_cache_layout={name!r} is unknown, or one of pages with scales only; use one of "
            f"{', '.join(LAYOUTS)}"
        ) from None


def set_kv_cache_layout(layout: str | None) -> None:
    """Set the layout of every later `PagedKVCache.allocate` without a `layout` argument.

    Takes precedence over ATTNLIB_KV_CACHE_LAYOUT. None removes the override.

    Raises:
        LayoutMismatchError: the name is unknown.
    """
    global _override
    _override = None if layout is None else layout_named(layout).name


def kv_cache_layout_override() -> str | None:
    """The layout set by `set_kv_cache_layout`, else None."""
    return _override


def get_kv_cache_layout() -> str | None:
    """The layout set by `set_kv_cache_layout`, else by ATTNLIB_KV_CACHE_LAYOUT, else None."""
    return _override or env.read("ATTNLIB_KV_CACHE_LAYOUT") or None


def negotiate_layout(
    demands: Sequence[tuple[str, Sequence[str]]], requested: str | None = None
) -> str:
    """Choose one layout that every layer or backend can read.

    Args:
        demands: (name, readable layouts in order of preference) of each layer or backend; "ANY"
            stands for all layouts.
        requested: the layout set by the user, or None.

    Returns:
        `requested` if it is common to all, else the common layout that the first demand prefers;
        "NHD" if every demand is "ANY".

    Raises:
        LayoutMismatchError: there is no common layout; the message lists all demands.
    """
    common = [
        name for name in LAYOUTS if all("ANY" in reads or name in reads for _, reads in demands)
    ]
    if requested is not None:
        common = [name for name in common if name == layout_named(requested).name]
    if not common:
        named = "; ".join(f"{name} reads {', '.join(reads)}" for name, reads in demands)
        request = f"{requested} is requested, but " if requested else ""
        raise LayoutMismatchError(
            f"no common KV-cache layout: {request}{named}. Choose backends that share one, or "
            f"convert between caches."
        )
    preferred = [name for _, reads in demands for name in reads if name in common]
    return preferred[0] if preferred else common[0]
