"""Conversions of the library's formats with scales in the page (M16): their reference.

A group of elements is stored as integers or floats and one scale, the largest magnitude of the
group divided by the largest stored number. All arithmetic is float32 with one rounding per
operation, so that kernels can produce the same bits. Heads are `[n, D]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.sizes import MAX_KV_SCALE, MIN_KV_SCALE

__all__ = [
    "decode_fp8",
    "decode_int4",
    "decode_int8",
    "decode_mxfp4",
    "decode_nvfp4",
    "encode_fp8",
    "encode_int4",
    "encode_int8",
    "encode_mxfp4",
    "encode_nvfp4",
]


def encode_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """One float32 scale per head, and integers from -127 to 127."""
    groups, scale = _grouped(x, 1, 127.0, torch.float32)
    return _quotients(groups, scale, 127.0).round().to(torch.int8), scale


def decode_int8(elements: Tensor, scales: Tensor) -> Tensor:
    """The reverse of `encode_int8`."""
    return _scaled(elements.float(), scales)


def encode_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """One float32 scale per head, and e4m3 numbers."""
    groups, scale = _grouped(x, 1, 448.0, torch.float32)
    return _quotients(groups, scale, 448.0).to(torch.float8_e4m3fn), scale


def decode_fp8(elements: Tensor, scales: Tensor) -> Tensor:
    """The reverse of `encode_fp8`."""
    return _scaled(elements.float(), scales)


def encode_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Four float16 scales per head, and integers from -7 to 7. Bits 4 j of the 16-bit word i hold
    element `j * D / 4 + i`, so that each quarter of a head has its own scale and its own bits."""
    groups, scale = _grouped(x, 4, 7.0, torch.float16)
    numbers = (_quotients(groups, scale.float(), 7.0).round() + _OFFSET).to(torch.uint8)
    first, second, third, fourth = numbers.chunk(4, -1)
    packed = torch.stack((first | second << 4, third | fourth << 4), -1).flatten(-2)
    return packed, scale


def decode_int4(elements: Tensor, scales: Tensor) -> Tensor:
    """The reverse of `encode_int4`."""
    low, high = elements[..., 0::2], elements[..., 1::2]
    numbers = torch.cat((low & 15, low >> 4, high & 15, high >> 4), -1)
    return _scaled(numbers.float() - _OFFSET, scales.float())


def encode_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """An e4m3 scale per 16 elements, as bytes, which every chip can load; and e2m1 numbers."""
    groups, scale = _grouped(x, x.shape[-1] // 16, 6.0, torch.float8_e4m3fn)
    return _e2m1(_quotients(groups, scale.float(), 6.0)), scale.view(torch.uint8)


def decode_nvfp4(elements: Tensor, scales: Tensor) -> Tensor:
    """The reverse of `encode_nvfp4`."""
    return _scaled(_from_e2m1(elements), scales.view(torch.float8_e4m3fn).float())


def encode_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """A power of two (e8m0) per 32 elements, and e2m1 numbers. The exponent of a scale is that of
    the largest magnitude, less 2, which is the exponent of the largest e2m1 number; from 2^-126
    on."""
    groups, largest = _groups(x, x.shape[-1] // 32)
    finite = largest.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)
    stored = ((finite.view(torch.int32) >> 23) - 2).clamp(min=1)
    is_nan = largest.isnan()
    factor = torch.where(is_nan, torch.nan, (stored.float() - 127.0).exp2())
    scale = torch.where(is_nan, _E8M0_NAN, stored).to(torch.uint8)
    return _e2m1(_quotients(groups, factor, 6.0)), scale


def decode_mxfp4(elements: Tensor, scales: Tensor) -> Tensor:
    """The reverse of `encode_mxfp4`."""
    factor = torch.where(scales == _E8M0_NAN, torch.nan, (scales.float() - 127.0).exp2())
    return _scaled(_from_e2m1(elements), factor)


_OFFSET = 8
"""4-bit integers are stored plus 8: bytes of zeros are the smallest number, with a scale of 0."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of the 4-bit float e2m1 by their bits."""

_E8M0_NAN = 255


def _groups(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """`[n, groups, D / groups]`, and the largest magnitudes `[n, groups]`: NaN if a group has
    one."""
    groups = x.view(x.shape[0], num_groups, x.shape[-1] // num_groups)
    return groups, groups.abs().amax(-1)


def _grouped(
    x: Tensor, num_groups: int, largest_number: float, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The groups of heads, and their scales."""
    groups, largest = _groups(x, num_groups)
    # torch multiplies by the reciprocal of a number on a GPU; it divides by a tensor.
    scale = largest / torch.full_like(largest, largest_number)
    scale = scale.clamp(max=min(MAX_KV_SCALE, torch.finfo(scale_dtype).max))
    return groups, torch.where(scale < MIN_KV_SCALE, 0.0, scale).to(scale_dtype)


def _quotients(groups: Tensor, scale: Tensor, largest_number: float) -> Tensor:
    """Elements divided by their scales, saturated, `[n, D]`; 0 in groups without a scale."""
    factor = scale.unsqueeze(-1)
    exact = torch.where(factor > 0, groups / factor, 0.0)  # NaN is not above 0
    return exact.clamp(-largest_number, largest_number).flatten(-2)


def _scaled(numbers: Tensor, factor: Tensor) -> Tensor:
    """`[n, D]` numbers times their scales `[n, G]`."""
    groups = numbers.view(*factor.shape, numbers.shape[-1] // factor.shape[-1])
    return (groups * factor.unsqueeze(-1)).flatten(-2)


def _e2m1(exact: Tensor) -> Tensor:
    """The bits of the nearest e2m1 numbers, ties to even bits, two per byte; |exact| is at most
    6."""
    x = exact.abs()
    bits = torch.zeros_like(x, dtype=torch.uint8)
    for number, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        # The number above the middle has even bits where `number` is odd.
        bits += (x >= middle) if number % 2 else (x > middle)
    bits |= torch.signbit(exact).to(torch.uint8) << 3
    return bits[..., 0::2] | bits[..., 1::2] << 4


def _from_e2m1(elements: Tensor) -> Tensor:
    numbers = torch.stack((elements & 15, elements >> 4), -1).flatten(-2).long()
    return torch.tensor(_E2M1, dtype=torch.float32, device=elements.device)[numbers]
