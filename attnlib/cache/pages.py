"""Pages of formats that store their scales in the page (P13).

A page is one contiguous region of bytes with four parts: elements of the keys, elements of the
values, scales of the keys, scales of the values; a side in the dtype of the
model has no scales. Each part is ordered heads first (`HND_INTERLEAVED`, the default) or tokens
first (`NHD_INTERLEAVED`) and starts at a multiple of 16 bytes, so that copying the bytes of a page
copies the block. With `HND_ROWS`, the four parts of a head of a token follow each other in one row
of bytes, `[Hkv, N, row]`, so that memory can be cut by heads.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from attnlib.errors import ContractError, LayoutMismatchError
from attnlib.kv_dtype import KVFormat
from attnlib.spec import AttentionSpec

__all__ = [
    "Formats",
    "PAGE_LAYOUTS",
    "PageSizes",
    "page_bytes",
    "page_layout",
    "page_shape",
    "page_sizes",
    "page_views",
]

PAGE_LAYOUTS = ("HND_INTERLEAVED", "NHD_INTERLEAVED", "HND_ROWS")
"""The layouts of a page, the default first."""

_ALIGNMENT = 16
"""Bytes: kernels read elements in vectors of this size."""


Formats = tuple[KVFormat, KVFormat]
"""Those of keys and of values."""
Scales = torch.Tensor | float


class PageSizes(NamedTuple):
    """Byte offsets within a page.

    Attributes:
        key, value, k_scale, v_scale: where the four parts start; those of the first row of rows.
        num_bytes: size of the page.
        row: bytes of a head of a token in a page of rows; 0 for pages of parts.
    """

    key: int
    value: int
    k_scale: int
    v_scale: int
    num_bytes: int
    row: int = 0


def page_shape(spec: AttentionSpec) -> tuple[Formats, int, int, int, int]:
    """Formats, N, Hkv, D and Dv of a page of a layer."""
    sizes = (spec.block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v)
    return ((spec.kv_format, spec.value_format), *sizes)


def page_layout(spec: AttentionSpec, layout: str | None = None) -> str:
    """The layout of the pages of a layer: the given one, that of the spec, or the default."""
    return (layout or spec.kv_cache_layout or PAGE_LAYOUTS[0]).upper()


def page_bytes(spec: AttentionSpec, layout: str | None = None) -> int:
    """Bytes of a page of a layer."""
    return page_sizes(*page_shape(spec), page_layout(spec, layout)).num_bytes


def page_sizes(
    stored: Formats,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int,
    layout: str = PAGE_LAYOUTS[0],
) -> PageSizes:
    """Where the parts of a page start, and its size, for the formats of keys and values."""
    heads = block_size * num_kv_heads
    sides = list(zip(stored, (head_size, head_size_v), strict=True))
    elements = [one.stored_size(size) * one.dtype.itemsize for one, size in sides]
    scales = [one.bytes_per_head(size) - n for (one, size), n in zip(sides, elements, strict=True)]
    if layout == "HND_ROWS":
        # Kernels load words of 2 bytes, and up to 8 bytes of scales at once.
        units = [max(2, one.dtype.itemsize if one.scale_dtype is None else 1) for one in stored]
        units += [one.scale_unit for one in stored]
        starts, end = [], 0
        for unit, size in zip(units, (*elements, *scales), strict=True):
            starts.append(_up(end, unit))
            end = starts[-1] + size
        row = _up(end, max(units))
        return PageSizes._make((*starts, _up(heads * row, _ALIGNMENT), row))
    offsets = [0]
    for size in (heads * each for each in (*elements, *scales)):
        offsets.append(_up(offsets[-1] + size, _ALIGNMENT))
    return PageSizes(*offsets)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def page_views(
    pages: torch.Tensor,
    stored: Formats,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, Scales, Scales]:
    """The views of a pool of pages.

    Args:
        pages: `[B, num_bytes]` uint8; bytes past those of `page_sizes` are not used.
        stored: the formats of keys and of values.
        layout: a name of `PAGE_LAYOUTS`.

    Returns:
        (`key_cache` `[B, N, Hkv, stored size]`, `value_cache`, scales of the keys
        `[B, N, Hkv, scales per head]`, scales of the values). The scale of a side without scales
        in the page is 1.

    Raises:
        ContractError: `pages` have another dtype or shape, or a page is not aligned to 16 bytes.
        LayoutMismatchError: no layout of a page.
    """
    if layout.upper() not in PAGE_LAYOUTS:
        name = next(one.name for one in stored if one.scales_in_page)
        raise LayoutMismatchError(
            f"kv_cache_layout={layout!r} is not a layout of {name}, whose pages hold elements and "
            f"scales: use {' or '.join(PAGE_LAYOUTS)}"
        )
    layout = layout.upper()
    sizes = page_sizes(stored, block_size, num_kv_heads, head_size, head_size_v, layout)
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] < sizes.num_bytes:
        raise ContractError(
            f"pages are {pages.dtype} {tuple(pages.shape)}; they must be uint8 [blocks, at least "
            f"{sizes.num_bytes}]",
            rule="P13",
        )
    _check_alignment(pages)
    heads_first = layout != "NHD_INTERLEAVED"
    outer = (num_kv_heads, block_size) if heads_first else (block_size, num_kv_heads)

    def part(start: int, dtype: torch.dtype, inner: int) -> torch.Tensor:
        view = _part(pages, sizes, outer, start, dtype, inner)
        return view.transpose(1, 2) if heads_first else view

    def scales(start: int, one: KVFormat, size: int) -> Scales:
        return (
            1.0 if one.scale_dtype is None else part(start, one.scale_dtype, one.num_scales(size))
        )

    keys, values = stored
    return (
        part(sizes.key, keys.dtype, keys.stored_size(head_size)),
        part(sizes.value, values.dtype, values.stored_size(head_size_v)),
        scales(sizes.k_scale, keys, head_size),
        scales(sizes.v_scale, values, head_size_v),
    )


def _part(
    pages: torch.Tensor,
    sizes: PageSizes,
    outer: tuple[int, int],
    start: int,
    dtype: torch.dtype,
    inner: int,
) -> torch.Tensor:
    """One of the four parts, `[B, *outer, inner]`."""
    shape, num_bytes = (pages.shape[0], *outer), inner * dtype.itemsize
    if sizes.row:
        rows = pages[:, : prod(outer) * sizes.row].view(*shape, sizes.row)
        return rows[..., start : start + num_bytes].view(dtype)
    return pages[:, start : start + prod(outer) * num_bytes].view(dtype).view(*shape, inner)


def _check_alignment(pages: torch.Tensor) -> None:
    """Whether kernels can read the pages in vectors.

    Raises:
        ContractError: the bytes of a page are apart, or a page starts elsewhere than at a multiple
            of 16.
    """
    strides = pages.stride()
    misplaced = pages.data_ptr() % _ALIGNMENT if not pages.is_meta else 0
    if strides[1] != 1 or strides[0] % _ALIGNMENT or misplaced:
        raise ContractError(
            f"pages have strides {strides} and start at {misplaced} modulo {_ALIGNMENT}; bytes of "
            f"a page must be consecutive, and pages must start at multiples of {_ALIGNMENT} bytes",
            rule="P13",
        )
