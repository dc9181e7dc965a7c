"""Packed latents (P14), 656 bytes per token, built without library code.

Scales and elements follow from exact quotients, as in `page_formats`; bytes are put together by
integer arithmetic.
"""

from __future__ import annotations

import math

import torch

from attnlib.testing.page_formats import e4m3_magnitudes, nearest_e4m3

__all__ = ["canonical_tokens", "pack_tokens", "unpack_tokens"]

_SCALES, _ROTARY, _END = 512, 528, 656
"""The first byte of the scales, that of the rotary part, and the number of bytes. An element of the
latent has one byte."""


def pack_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """The bytes of tokens.

    Args:
        tokens: `[T, 576]`, any float dtype, on the CPU. Groups with a NaN or an infinity get the
            elements 0x7F, and a NaN of the rotary part becomes 0x7FC0.

    Returns:
        `[T, 656]` uint8.
    """
    x = _groups(tokens[:, :_SCALES].double())
    has_nan = x.isnan().any(-1)
    largest = x.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(-1)
    scale = (largest / 448).float().double().clamp(min=2.0**-126)
    quotient = (x.nan_to_num() / scale[..., None]).float().double().clamp(-448, 448)
    elements = nearest_e4m3(quotient)
    elements[has_nan | largest.isinf()] = 0x7F
    scale = torch.where(has_nan, math.nan, scale).float()
    packed = torch.empty(len(tokens), _END, dtype=torch.uint8)
    packed[:, :_SCALES] = elements.flatten(1)
    packed[:, _SCALES:_ROTARY] = _bytes_of(scale.contiguous().view(torch.int32), 4)
    packed[:, _ROTARY:] = _bytes_of(_bfloat16_bits(tokens[:, _SCALES:]), 2)
    return packed


def unpack_tokens(packed: torch.Tensor) -> torch.Tensor:
    """The real values of the bytes `[..., 656]`: float32 `[..., 576]`, on the CPU."""
    numbers = packed.cpu().long()
    magnitudes = torch.cat((e4m3_magnitudes(), torch.tensor([math.nan])))
    elements = numbers[..., :_SCALES]
    values = magnitudes[elements & 127] * torch.where(elements > 127, -1.0, 1.0)
    scales = _numbers_of(numbers[..., _SCALES:_ROTARY], 4).int().view(torch.float32).double()
    latents = (_groups(values) * scales[..., None]).flatten(-2).float()
    rotary = (_numbers_of(numbers[..., _ROTARY:], 2) << 16).int().view(torch.float32)
    return torch.cat((latents, rotary), -1)


def canonical_tokens(packed: torch.Tensor) -> torch.Tensor:
    """The bytes with one form of each group that reads as NaN: elements 0x7F and, for a scale that
    is NaN, the bits of `pack_tokens`. Other bytes are as they are."""
    packed = packed.cpu().clone()
    is_nan = _groups(unpack_tokens(packed)[..., :_SCALES]).isnan().all(-1)
    elements = _groups(packed[..., :_SCALES])
    packed[..., :_SCALES] = torch.where(is_nan[..., None], 0x7F, elements).flatten(-2)
    scales = _groups(packed[..., _SCALES:_ROTARY])
    bits = _numbers_of(packed[..., _SCALES:_ROTARY].long(), 4)
    nan = torch.tensor([math.nan]).view(torch.uint8)
    nan_scale = (bits & 0x7FFFFFFF) > 0x7F800000
    packed[..., _SCALES:_ROTARY] = torch.where(nan_scale[..., None], nan, scales).flatten(-2)
    return packed


def _groups(tokens: torch.Tensor) -> torch.Tensor:
    """What belongs to each scale: `[..., 4 * n]` to `[..., 4, n]`."""
    return tokens.reshape(*tokens.shape[:-1], 4, tokens.shape[-1] // 4)


def _bfloat16_bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of the nearest bfloat16 numbers, ties to even."""
    bits = x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return torch.where(x.isnan(), 0x7FC0, rounded)


def _bytes_of(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Little-endian bytes: `[..., n]` to `[..., n * size]`."""
    parts = [(numbers.long() >> (8 * place)) & 255 for place in range(size)]
    return torch.stack(parts, -1).flatten(-2).to(torch.uint8)


def _numbers_of(stored: torch.Tensor, size: int) -> torch.Tensor:
    """Unsigned numbers of little-endian bytes: `[..., n * size]` to `[..., n]`, as int64; those of
    32 bits that exceed int32 wrap."""
    places = stored.reshape(*stored.shape[:-1], stored.shape[-1] // size, size) << (
        8 * torch.arange(size)
    )
    found = places.sum(-1)
    return torch.where(found >= 1 << 31, found - (1 << 32), found)
