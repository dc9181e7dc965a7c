"""The numbers of formats with scales in the page (M16), computed without library code; those of
open formats (P16) with their own functions.

Elements are computed by integer arithmetic on exact quotients: float64 holds the quotient of two
float32 numbers so exactly that rounding it to float32 gives the correctly rounded quotient.
"""

from __future__ import annotations

import math

import torch

from attnlib.kv_formats import find_kv_format

__all__ = [
    "GROUPS",
    "PAGE_DTYPES",
    "PAGE_NAMES",
    "dequantize_tokens",
    "e4m3_magnitudes",
    "is_page_name",
    "name_of",
    "nearest_e4m3",
    "num_groups",
    "quantize_tokens",
]

PAGE_NAMES = ("int8_per_token_head", "fp8_per_token_head", "int4_per_group", "nvfp4", "mxfp4")

PAGE_DTYPES = {
    "int8_per_token_head": (torch.int8, torch.float32),
    "fp8_per_token_head": (torch.float8_e4m3fn, torch.float32),
    "int4_per_group": (torch.uint8, torch.float16),
    "nvfp4": (torch.uint8, torch.uint8),
    "mxfp4": (torch.uint8, torch.uint8),
}
"""Dtypes of elements and scales; those of nvfp4 are the bits of e4m3, of mxfp4 of e8m0."""

GROUPS = {"nvfp4": 16, "mxfp4": 32}
"""Elements per scale, where their number is fixed."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def is_page_name(name: str) -> bool:
    """Whether a format of this name has scales in the page."""
    return name in PAGE_NAMES or ":" in name


def num_groups(name: str, size: int) -> int:
    return size // GROUPS[name] if name in GROUPS else 4 if name == "int4_per_group" else 1


_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-100, 2.0**100


def e4m3_magnitudes() -> torch.Tensor:
    """The 127 finite magnitudes of e4m3 in order, which is the order of their bits."""
    values = []
    for bits in range(127):
        exponent, mantissa = bits >> 3, bits & 7
        values.append(
            math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
        )
    return torch.tensor(values, dtype=torch.float64)


def name_of(elements: torch.Tensor, scales: torch.Tensor) -> str:
    dtypes = (elements.dtype, scales.dtype)
    size = elements.shape[-1] * (2 if elements.dtype == torch.uint8 else 1)
    return next(
        name
        for name, found in PAGE_DTYPES.items()
        if found == dtypes and num_groups(name, size) == scales.shape[-1]
    )


def quantize_tokens(tokens: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements and scales of tokens `[T, H, D]`, as `allocate_pages` stores them."""
    if ":" in name:
        return find_kv_format(name).store(tokens)
    dtype, scale_dtype = PAGE_DTYPES[name]
    largest = {"int8_per_token_head": 127, "fp8_per_token_head": 448, "int4_per_group": 7}.get(
        name, 6
    )
    groups = num_groups(name, tokens.shape[-1])
    x = tokens.double().reshape(*tokens.shape[:-1], groups, -1)
    has_nan = x.isnan().any(-1)
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(-1)
    if name == "mxfp4":
        exponent = torch.frexp(magnitude.clamp(max=torch.finfo(torch.float32).max)).exponent - 3
        exponent = torch.where(magnitude == 0, -126, exponent).clamp(-126, 125)
        scale = torch.ldexp(torch.ones_like(magnitude), exponent)
    else:
        scale = (magnitude / largest).float().double()
        limit = 448.0 if name == "nvfp4" else torch.finfo(scale_dtype).max
        scale = scale.clamp(max=min(_LARGEST_SCALE, limit))
        scale = torch.where(scale < _SMALLEST_SCALE, 0.0, scale)
    if name == "nvfp4":
        scale_bits = nearest_e4m3(scale)
        scale = e4m3_magnitudes()[scale_bits.long()]
    elif name != "mxfp4":
        scale = scale.to(scale_dtype).double()
    quotient = torch.where(scale[..., None] > 0, x / scale[..., None], 0.0).float().double()
    quotient = torch.where(has_nan[..., None], 0.0, quotient).clamp(-largest, largest).flatten(-2)
    if name == "mxfp4":
        scales = torch.where(has_nan, 255, exponent + 127).to(torch.uint8)
    elif name == "nvfp4":
        scales = torch.where(has_nan, 0x7F, scale_bits).to(torch.uint8)
    else:
        scales = torch.where(has_nan, math.nan, scale).to(scale_dtype)
    if name in GROUPS:
        bits = _nearest(quotient, torch.tensor(_E2M1, dtype=torch.float64), 8)
        return bits[..., 0::2] | bits[..., 1::2] << 4, scales
    if name == "fp8_per_token_head":
        return nearest_e4m3(quotient).view(dtype), scales
    numbers = _half_to_even(quotient)
    if name == "int8_per_token_head":
        return numbers.to(torch.int8), scales
    size = tokens.shape[-1] // 4
    words = torch.zeros(*tokens.shape[:-1], size, dtype=torch.int64)
    for element in range(tokens.shape[-1]):
        part, word = divmod(element, size)
        words[..., word] |= (numbers[..., element] + 8) << (4 * part)
    packed = torch.stack((words & 255, words >> 8), -1).flatten(-2)
    return packed.to(torch.uint8), scales


def dequantize_tokens(
    elements: torch.Tensor, scales: torch.Tensor, name: str | None = None
) -> torch.Tensor:
    """The real values of elements `[..., stored]` with scales `[..., G]`, float64 `[..., D]`.

    Args:
        name: of the format; None for the one of the library with these dtypes.
    """
    name = name or name_of(elements, scales)
    if ":" in name:
        return find_kv_format(name).load(elements, scales).double()
    if name == "fp8_per_token_head":
        bits = elements.contiguous().view(torch.uint8).long()
        magnitudes = torch.cat((e4m3_magnitudes(), torch.tensor([math.nan]))).to(bits.device)
        numbers = magnitudes[bits & 127] * torch.where(bits > 127, -1.0, 1.0)
    elif name in GROUPS:
        bits = torch.stack((elements & 15, elements >> 4), -1).flatten(-2).long()
        table = torch.tensor(_E2M1, dtype=torch.float64, device=bits.device)
        numbers = table[bits & 7] * torch.where(bits > 7, -1.0, 1.0)
    elif name == "int8_per_token_head":
        numbers = elements.double()
    else:
        low, high = elements[..., 0::2].long(), elements[..., 1::2].long()
        words = low + 256 * high
        parts = [(words >> (4 * part)) % 16 - 8 for part in range(4)]
        numbers = torch.cat(parts, -1).double()
    repeats = numbers.shape[-1] // scales.shape[-1]
    factors = scales.double()
    if name == "mxfp4":
        factors = torch.where(scales == 255, math.nan, 2.0 ** (factors - 127))
    elif name == "nvfp4":
        magnitudes = torch.cat((e4m3_magnitudes(), torch.tensor([math.nan]))).to(scales.device)
        factors = magnitudes[scales.long() & 127]
    return numbers * factors.repeat_interleave(repeats, dim=-1)


def _half_to_even(quotient: torch.Tensor) -> torch.Tensor:
    """The nearest integers, ties to even."""
    below = quotient.floor().long()
    rest = quotient - below
    up = (rest > 0.5) | ((rest == 0.5) & (below % 2 == 1))
    return below + up.long()


def nearest_e4m3(quotient: torch.Tensor) -> torch.Tensor:
    """The bits of the nearest e4m3 numbers, ties to even bits; |quotient| is at most 448."""
    return _nearest(quotient, e4m3_magnitudes(), 128)


def _nearest(quotient: torch.Tensor, table: torch.Tensor, sign: int) -> torch.Tensor:
    """Indices of the nearest entries of a table of magnitudes, ties to even; plus `sign` for
    negative numbers."""
    magnitude = quotient.abs()
    above = torch.searchsorted(table, magnitude).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = table[above] - magnitude, magnitude - table[below]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    bits = torch.where(up, above, below)
    return (bits + sign * torch.signbit(quotient).long()).to(torch.uint8)
