"""Memory layouts of the paged cache, built without library code.

A layout is a key view and a value view of the same shape over one or two allocations (P1, P2). The
conformance suite fills and reads these views with plain indexing, so that an error in a backend's
cache write cannot cancel an error in its cache read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attnlib.errors import ContractError
from attnlib.testing.page_formats import (
    PAGE_LAYOUT_NAMES,
    allocate_pages,
    fill_pages,
    write_page_slots,
)

__all__ = [
    "CACHE_LAYOUTS",
    "CacheViews",
    "Dimensions",
    "allocate_views",
    "poison_value",
    "read_slots",
    "write_slots",
]


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes and dtypes of one layer: Hq, Hkv, D, Dv, N. `page_formats` names the formats of keys
    and values in pages with scales (M16), `kv_rotation` a rotation (P15)."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    page_formats: tuple[str, str] | None = None
    kv_rotation: str | None = None

    @property
    def side_formats(self) -> tuple[str | None, str | None]:
        """`page_formats`, or None for both sides."""
        return self.page_formats or (None, None)


Scales = torch.Tensor | float


@dataclass(frozen=True)
class CacheViews:
    """The two views of a cache and the memory under them.

    Attributes:
        key: [B, N, Hkv, D], last stride 1.
        value: [B, N, Hkv, Dv], last stride 1.
        storage: flat uint8 views of the allocations, including unused bytes.
        layout: a name of `CACHE_LAYOUTS` or "ALIASED".
        scales: the scales of keys and values in the pages, [B, N, Hkv, G] (M16), 1 for a side
            without them; None for caches without them.
    """

    key: torch.Tensor
    value: torch.Tensor
    storage: tuple[torch.Tensor, ...]
    layout: str
    scales: tuple[Scales, Scales] | None = None


Allocate = Callable[[Sequence[int]], torch.Tensor]
_Views = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]


def _separate(dims: Dimensions, blocks: int, empty: Allocate, heads_first: bool) -> _Views:
    """K and V in separate tensors."""
    page = (
        (dims.num_kv_heads, dims.block_size)
        if heads_first
        else (dims.block_size, dims.num_kv_heads)
    )
    key, value = empty((blocks, *page, dims.head_size)), empty((blocks, *page, dims.head_size_v))
    if heads_first:
        return key.transpose(1, 2), value.transpose(1, 2), (key, value)
    return key, value, (key, value)


def _interleaved(dims: Dimensions, blocks: int, empty: Allocate, heads_first: bool) -> _Views:
    """K block, V block, K block, ... in one allocation, as in vLLM's (num_blocks, 2, ...)."""
    page = (
        (dims.num_kv_heads, dims.block_size)
        if heads_first
        else (dims.block_size, dims.num_kv_heads)
    )
    split = page[0] * page[1] * dims.head_size
    both = empty((blocks, page[0] * page[1] * (dims.head_size + dims.head_size_v)))
    key = both[:, :split].view(blocks, *page, dims.head_size)
    value = both[:, split:].view(blocks, *page, dims.head_size_v)
    if heads_first:
        return key.transpose(1, 2), value.transpose(1, 2), (both,)
    return key, value, (both,)


def _packed(dims: Dimensions, blocks: int, empty: Allocate, heads_first: bool) -> _Views:
    """K and V concatenated in the last dimension."""
    page = (
        (dims.num_kv_heads, dims.block_size)
        if heads_first
        else (dims.block_size, dims.num_kv_heads)
    )
    both = empty((blocks, *page, dims.head_size + dims.head_size_v))
    view = both.transpose(1, 2) if heads_first else both
    return view[..., : dims.head_size], view[..., dims.head_size :], (both,)


def _aliased(dims: Dimensions, blocks: int, empty: Allocate, heads_first: bool) -> _Views:
    """The value is a prefix of the key (multi-head latent attention)."""
    key = empty((blocks, dims.block_size, dims.num_kv_heads, dims.head_size))
    return key, key[..., : dims.head_size_v], (key,)


_MAKERS: dict[str, tuple[Callable[[Dimensions, int, Allocate, bool], _Views], bool]] = {
    "NHD": (_separate, False),
    "HND": (_separate, True),
    "NHD_INTERLEAVED": (_interleaved, False),
    "HND_INTERLEAVED": (_interleaved, True),
    "NHD_PACKED": (_packed, False),
    "HND_PACKED": (_packed, True),
    "ALIASED": (_aliased, False),
}
CACHE_LAYOUTS: tuple[str, ...] = tuple(name for name in _MAKERS if name != "ALIASED")


def allocate_views(
    dims: Dimensions,
    num_blocks: int,
    layout: str = "NHD",
    device: torch.device | str = "cpu",
    fill: str = "zero",
) -> CacheViews:
    """Allocate a cache and fill every element with `poison_value(dims.cache_dtype, fill)`.

    Raises:
        ContractError: the layout is unknown.
    """
    known = tuple(_MAKERS) if dims.page_formats is None else (*PAGE_LAYOUT_NAMES, "NHD")
    if layout not in known:
        raise ContractError(
            f"no cache layout is named {layout!r}; the layouts are {', '.join(known)}"
        )
    if dims.page_formats is not None:
        heads = (dims.num_kv_heads, (dims.head_size, dims.head_size_v))
        pages, views = allocate_pages(
            dims.page_formats, dims.dtype, num_blocks, dims.block_size, *heads, layout, device
        )
        fill_pages(views, fill)
        k_scales, v_scales = (scale if scale.shape[-1] else 1.0 for scale in views[2:])
        return CacheViews(views[0], views[1], (pages.view(-1),), layout, (k_scales, v_scales))
    value = poison_value(dims.cache_dtype, fill)

    def empty(shape: Sequence[int]) -> torch.Tensor:
        # torch cannot fill fp8 tensors on every device; float32 cannot hold the largest float64.
        through = torch.float64 if dims.cache_dtype == torch.float64 else torch.float32
        return torch.full(tuple(shape), value, dtype=through).to(dims.cache_dtype).to(device)

    make, heads_first = _MAKERS[layout]
    key, val, allocations = make(dims, num_blocks, empty, heads_first)
    return CacheViews(key, val, tuple(t.view(-1).view(torch.uint8) for t in allocations), layout)


def poison_value(dtype: torch.dtype, kind: str) -> float:
    """The fill value for memory that must not be read.

    Args:
        dtype: dtype of the memory.
        kind: "nan", "inf" (NaN for dtypes without infinities), "huge" (the largest finite number)
            or "zero" (no poison).

    Raises:
        ContractError: the kind is unknown.
    """
    huge = torch.finfo(dtype).max
    has_inf = dtype != torch.float8_e4m3fn
    values = {"zero": 0.0, "nan": math.nan, "inf": math.inf if has_inf else math.nan, "huge": huge}
    if kind not in values:
        raise ContractError(f"no poison is named {kind!r}; the kinds are {', '.join(values)}")
    return values[kind]


def _as_indexable(view: torch.Tensor) -> torch.Tensor:
    """View fp8 tensors as bytes, because some torch builds cannot index fp8."""
    return view.view(torch.uint8) if view.element_size() == 1 else view


def write_slots(
    view: torch.Tensor,
    slots: Sequence[int],
    tokens: torch.Tensor,
    scale: float | torch.Tensor,
    name: str | None = None,
) -> None:
    """Store tokens [T, H, D] at slots (P4); an fp8 view stores tokens / scale, saturated (M9).

    With scales in the page, `scale` is the view of these scales (M16), and `name` the format, or
    None for the one of the library with these dtypes.
    """
    if not len(slots):
        return
    if isinstance(scale, torch.Tensor) and scale.dim() == 4:
        write_page_slots(view, scale, slots, tokens, name)
        return
    block_size = view.shape[1]
    index = torch.as_tensor(slots, dtype=torch.long, device=view.device)
    stored = tokens
    if view.element_size() == 1:
        limit = torch.finfo(view.dtype).max
        per_head = torch.as_tensor(scale, dtype=torch.float32, device=tokens.device).expand(
            tokens.shape[1]
        )
        stored = (tokens.float() / per_head[:, None]).clamp(-limit, limit)
    _as_indexable(view)[index // block_size, index % block_size] = _as_indexable(
        stored.to(view.dtype)
    )


def read_slots(view: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
    """The stored elements of some slots, [len(slots), H, D]."""
    index = torch.as_tensor(slots, dtype=torch.long, device=view.device)
    return _as_indexable(view)[index // view.shape[1], index % view.shape[1]].view(view.dtype)
