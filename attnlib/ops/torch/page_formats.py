"""Formats with scales in the page (M16): the reference of their conversions.

A group of elements is stored as integers or 8-bit floats and one scale, the largest magnitude of
the group divided by the largest stored number. All arithmetic is float32 with one rounding per
operation, so that kernels can produce the same bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlib.kv_dtype import KVFormat, page_format
from attnlib.ops.params import AttentionParams
from attnlib.ops.scales import MAX_KV_SCALE, MIN_KV_SCALE

__all__ = ["dequantize_groups", "gather_pages", "quantize_groups"]


def quantize_groups(values: Tensor, stored: KVFormat) -> tuple[Tensor, Tensor]:
    """Stored elements and scales of new keys or values.

    Args:
        values: `[..., D]`.
        stored: the format.

    Returns:
        (elements `[..., stored size]` of `stored.dtype`, scales `[..., scales per head]`). The
        scale of a group with a NaN is NaN, and its elements are 0.
    """
    assert stored.scale_dtype is not None  # the caller has found a format with scales
    head_size = values.shape[-1]
    num_scales = stored.num_scales(head_size)
    groups = values.float().reshape(*values.shape[:-1], num_scales, head_size // num_scales)
    largest = groups.abs().amax(-1, keepdim=True)  # NaN if the group has one
    if stored.name == "mxfp4":
        scale, factor = _power_of_two(largest)
    else:
        # torch multiplies by the reciprocal of a number on a GPU; it divides by a tensor.
        scale = largest / torch.full_like(largest, stored.largest)
        scale = scale.clamp(max=_largest_scale(stored))
        scale = torch.where(scale < MIN_KV_SCALE, 0.0, scale).to(_number_dtype(stored))
        factor = scale.float()
        scale = scale.view(stored.scale_dtype)
    exact = torch.where(factor > 0, groups / factor, 0.0)  # NaN is not above 0
    exact = exact.clamp(-stored.largest, stored.largest).flatten(-2)
    if stored.elements_per_group:
        bits = _e2m1(exact)
        elements = bits[..., 0::2] | bits[..., 1::2] << 4
    elif stored.dtype.is_floating_point:
        elements = exact.to(stored.dtype)
    elif stored.bits == 8:
        elements = exact.round().to(stored.dtype)
    else:
        elements = _pack((exact.round() + _OFFSET).to(torch.uint8))
    return elements, scale.squeeze(-1)


def dequantize_groups(elements: Tensor, scales: Tensor, stored: KVFormat) -> Tensor:
    """The real values of stored elements, float32.

    Args:
        elements: `[..., stored size]`.
        scales: `[..., scales per head]`.
        stored: the format.

    Returns:
        `[..., D]`.
    """
    if stored.elements_per_group:
        numbers = torch.stack((elements & 15, elements >> 4), -1).flatten(-2).long()
        numbers = torch.tensor(_E2M1, device=elements.device)[numbers]
    elif stored.bits == 8:
        numbers = elements.float()
    else:
        numbers = _unpack(elements).float() - _OFFSET
    if stored.name == "mxfp4":
        factor = torch.where(scales == _E8M0_NAN, torch.nan, (scales.float() - 127.0).exp2())
    else:
        factor = scales.view(_number_dtype(stored)).float()
    groups = numbers.reshape(*scales.shape, numbers.shape[-1] // scales.shape[-1])
    return (groups * factor.unsqueeze(-1)).flatten(-2)


def gather_pages(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    params: AttentionParams,
) -> tuple[Tensor, Tensor, Tensor, AttentionParams]:
    """A cache without scales in the page as it is; else the pages of a batch in float32.

    Args:
        key_cache, value_cache: `[B, N, Hkv, stored size]`.
        block_table: `[R, M]` int32.
        lengths: sequence length of each request, on the host.
        params: with the scales of the cache.

    Returns:
        (keys `[P, N, Hkv, D]`, values, block table, parameters), the last with scales of 1.
    """
    if not params.scales_in_page:
        return key_cache, value_cache, block_table, params
    num_blocks, block_size = key_cache.shape[:2]
    width = -(-max(lengths.tolist(), default=0) // block_size)
    table = block_table[:, :width]
    ends = lengths.to(table.device).unsqueeze(1)
    used = torch.arange(width, device=table.device) * block_size < ends
    # Entries past the end of a request may hold anything (P3).
    blocks = torch.where(used, table, 0).flatten().clamp(0, max(num_blocks - 1, 0)).long()
    keys = _real_values(key_cache, params.k_scale, blocks)
    values = _real_values(value_cache, params.v_scale, blocks)
    renumbered = torch.arange(blocks.numel(), dtype=torch.int32, device=table.device)
    dense = replace(params, k_scale=1.0, v_scale=1.0)
    return keys, values, renumbered.view(table.shape[0], width), dense


_OFFSET = 8
"""4-bit integers are stored plus 8: bytes of zeros are the smallest number, with a scale of 0."""


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of the 4-bit float e2m1 by their bits."""

_E8M0_NAN = 255


def _e2m1(exact: Tensor) -> Tensor:
    """The bits of the nearest e2m1 numbers, ties to even bits; |exact| is at most 6."""
    x = exact.abs()
    bits = torch.zeros_like(x, dtype=torch.uint8)
    for number, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        # The number above the middle has even bits where `number` is odd.
        bits += (x >= middle) if number % 2 else (x > middle)
    return bits | torch.signbit(exact).to(torch.uint8) << 3


def _power_of_two(largest: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes and the values of e8m0 scales: 2 to the exponent of `largest`, less 2, which is the
    exponent of the largest e2m1 number; from 2^-126 on."""
    finite = largest.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)
    exponent = finite.view(torch.int32) >> 23
    stored = (exponent - 2).clamp(min=1)
    factor = (stored.float() - 127.0).exp2()
    is_nan = largest.isnan()
    bits = torch.where(is_nan, _E8M0_NAN, stored).to(torch.uint8)
    return bits, torch.where(is_nan, torch.nan, factor)


def _number_dtype(stored: KVFormat) -> torch.dtype:
    """The dtype of scales as numbers: e4m3 for the bytes of nvfp4."""
    assert stored.scale_dtype is not None  # a format with scales in the page
    return torch.float8_e4m3fn if stored.name == "nvfp4" else stored.scale_dtype


def _largest_scale(stored: KVFormat) -> float:
    return min(MAX_KV_SCALE, torch.finfo(_number_dtype(stored)).max)


def _pack(numbers: Tensor) -> Tensor:
    """`[..., D]` of 0 to 15 in `[..., D / 2]` bytes: bits 4 j of the 16-bit word i hold element
    `j * D / 4 + i`, so that each quarter of a head has its own scale and its own bits."""
    first, second, third, fourth = numbers.chunk(4, -1)
    return torch.stack((first | second << 4, third | fourth << 4), -1).flatten(-2)


def _unpack(packed: Tensor) -> Tensor:
    """`[..., D / 2]` bytes as `[..., D]` numbers from 0 to 15."""
    low, high = packed[..., 0::2], packed[..., 1::2]
    return torch.cat((low & 15, low >> 4, high & 15, high >> 4), -1)


def _real_values(cache: Tensor, scales: float | Tensor, blocks: Tensor) -> Tensor:
    """The real values of some blocks, float32. A side without scales in the page has none."""
    stored, elements = page_format(cache, scales), _blocks(cache, blocks)
    if stored is None or not isinstance(scales, Tensor):
        return elements.float()
    return dequantize_groups(elements, _blocks(scales, blocks), stored)


def _blocks(view: Tensor, blocks: Tensor) -> Tensor:
    """Blocks of a view; float8 is indexed as bytes, because not every device can index it."""
    raw = view.view(torch.uint8) if view.element_size() == 1 else view
    return raw.index_select(0, blocks).view(view.dtype)
