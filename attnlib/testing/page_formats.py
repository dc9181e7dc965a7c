"""Pages of formats with scales in the page (M16, P13), built without library code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attnlib.kv_formats import find_kv_format
from attnlib.testing.page_numbers import (
    GROUPS,
    PAGE_DTYPES,
    PAGE_NAMES,
    dequantize_tokens,
    e4m3_magnitudes,
    is_page_name,
    name_of,
    nearest_e4m3,
    num_groups,
    quantize_tokens,
)

__all__ = [
    "PAGE_LAYOUT_NAMES",
    "PAGE_NAMES",
    "allocate_pages",
    "dequantize_tokens",
    "e4m3_magnitudes",
    "fill_pages",
    "is_page_name",
    "nearest_e4m3",
    "quantize_tokens",
    "write_page_slots",
]

PAGE_LAYOUT_NAMES = ("HND_INTERLEAVED", "NHD_INTERLEAVED", "HND_ROWS")


def _parts(name: str, plain: torch.dtype, size: int) -> tuple[tuple[torch.dtype, int], ...]:
    """Dtype and number of the elements, and of the scales, of a head of `size`."""
    if ":" in name:
        stored = find_kv_format(name)
        assert stored.scale_dtype is not None  # of an open format
        elements = (stored.dtype, stored.stored_size(size))
        return elements, (stored.scale_dtype, stored.num_scales(size))
    if name not in PAGE_DTYPES:
        return (plain, size), (torch.float32, 0)
    dtype, scale_dtype = PAGE_DTYPES[name]
    elements = (dtype, size // 2 if dtype == torch.uint8 else size)
    return elements, (scale_dtype, num_groups(name, size))


def allocate_pages(
    names: tuple[str, str],
    plain: torch.dtype,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    sizes: tuple[int, int],
    layout: str,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """A pool of pages of zeros and its views.

    Args:
        names: the formats of keys and values; "plain" stores elements of the dtype `plain`.
        sizes: D and Dv.
        layout: a name of `PAGE_LAYOUT_NAMES`.

    Returns:
        (pages `[B, bytes]` uint8, (elements of the keys `[B, N, Hkv, stored]`, of the values,
        scales of the keys `[B, N, Hkv, G]`, of the values)). A plain side has 0 scales.
    """
    elements, scales = zip(
        *(_parts(name, plain, size) for name, size in zip(names, sizes, strict=True)), strict=True
    )
    parts = [*elements, *scales]
    if layout == "HND_ROWS":
        return _rows(parts, names, num_blocks, block_size, num_kv_heads, device)
    starts, end = [], 0
    for part, inner in parts:
        starts.append(end)
        end += block_size * num_kv_heads * inner * part.itemsize
        end += -end % 16
    pages = torch.zeros(num_blocks, end, dtype=torch.uint8, device=device)
    views = []
    for start, (part, inner) in zip(starts, parts, strict=True):
        num_bytes = block_size * num_kv_heads * inner * part.itemsize
        flat = pages[:, start : start + num_bytes].view(part)
        if layout == "HND_INTERLEAVED":
            view = flat.view(num_blocks, num_kv_heads, block_size, inner).transpose(1, 2)
        else:
            view = flat.view(num_blocks, block_size, num_kv_heads, inner)
        views.append(view)
    return pages, tuple(views)


def _has_fixed_number(name: str) -> bool:
    """Whether heads of all sizes have as many scales."""
    return not find_kv_format(name).elements_per_group if ":" in name else name not in GROUPS


def _rows(
    parts: Sequence[tuple[torch.dtype, int]],
    names: tuple[str, str],
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    device: torch.device | str,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """`allocate_pages` for "HND_ROWS": elements start at even bytes, all scales of a format with a
    fixed number of them at multiples of their size together, of 8 bytes at most."""
    views, starts, end, widest = [], [], 0, 2
    for index, (dtype, inner) in enumerate(parts):
        unit = max(2, dtype.itemsize) if index < 2 else dtype.itemsize if inner else 1
        if index >= 2 and inner and _has_fixed_number(names[index - 2]):
            while unit < 8 and inner * dtype.itemsize % (2 * unit) == 0:
                unit *= 2
        end += -end % unit
        starts.append(end)
        end += inner * dtype.itemsize
        widest = max(widest, unit)
    row = end + -end % widest
    size = num_kv_heads * block_size * row
    pages = torch.zeros(num_blocks, size + -size % 16, dtype=torch.uint8, device=device)
    for start, (dtype, inner) in zip(starts, parts, strict=True):
        shape = (num_blocks, num_kv_heads, block_size, inner)
        strides = (pages.shape[1], block_size * row, row)
        first = start // dtype.itemsize
        flat = pages.view(-1).view(dtype)
        elements = tuple(stride // dtype.itemsize for stride in strides)
        views.append(flat.as_strided(shape, (*elements, 1), first).transpose(1, 2))
    return pages, tuple(views)


def fill_pages(views: Sequence[torch.Tensor], poison: str) -> None:
    """Fill elements with ones in every bit, and scales with poison, unless it is "zero"."""
    if poison == "zero":
        return
    scale = {"nan": math.nan, "inf": math.inf}.get(poison)
    for view in views[:2]:
        view.view(torch.uint8).fill_(0xFF)  # NaN of a plain side, too
    for view in views[2:]:
        if view.element_size() == 1:  # NaN of e4m3 and e8m0, or a large number of both
            view.view(torch.uint8).fill_(0x7E if scale is None else 0xFF)
        else:
            view.fill_(torch.finfo(view.dtype).max if scale is None else scale)


def write_page_slots(
    elements: torch.Tensor,
    scales: torch.Tensor,
    slots: Sequence[int],
    tokens: torch.Tensor,
    name: str | None = None,
) -> None:
    """Store tokens `[T, H, D]` at slots (P4); `name` as in `dequantize_tokens`."""
    block_size = elements.shape[1]
    new_elements, new_scales = quantize_tokens(tokens.cpu(), name or name_of(elements, scales))
    index = torch.as_tensor(slots, dtype=torch.long)
    at = (index // block_size, index % block_size)
    raw = elements.view(torch.uint8) if elements.dtype.is_floating_point else elements
    raw[at] = new_elements.view(raw.dtype).to(raw.device)
    scales[at] = new_scales.to(scales.device)
