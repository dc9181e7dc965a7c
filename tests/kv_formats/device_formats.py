"""Open formats of 8 bits with device functions (P16)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlib.kv_formats import KVFormat
from attnlib.score_functions import where

__all__ = ["CUBES", "SQUARES", "STEPS"]


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Signed squares of numbers from 0 to 127: fine steps around 0."""
    has_nan = x.isnan().any(-1, keepdim=True)
    x = x.nan_to_num(0.0).clamp(-1e30, 1e30)
    # A product: torch divides by a number on a CPU, and multiplies by its reciprocal on CUDA.
    scale = x.abs().amax(-1, keepdim=True) * (1 / 127.0**2)
    roots = (x.abs() / scale.clamp(min=1e-37)).sqrt().round().clamp(0, 127)
    codes = torch.where(scale > 0, roots, 0.0).to(torch.uint8) | (x < 0).to(torch.uint8) << 7
    return codes, torch.where(has_nan, torch.nan, scale)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """The reverse of `encode`."""
    roots = (codes & 127).float()
    return torch.where(codes > 127, -roots * roots, roots * roots) * scale


def number(word: Any, part: int) -> Any:
    """The device function."""
    code = (word >> (8 * part)) & 255
    root = (code & 127) * 1.0
    return where(code > 127, -root * root, root * root)


SQUARES = KVFormat(
    name="tests:squares", version=1, dtype=torch.uint8, bits=8, scale_dtype=torch.float32,
    groups_per_head=1, encode=encode, decode=decode, error=0.02, number=number,
)  # fmt: skip


def encode_steps(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127, stored plus 128."""
    has_nan = x.isnan().any(-1, keepdim=True)
    x = x.nan_to_num(0.0).clamp(-1e30, 1e30)
    scale = x.abs().amax(-1, keepdim=True) * (1 / 127.0)
    codes = (x / scale.clamp(min=1e-37)).round().clamp(-127, 127) + 128.0
    return codes.to(torch.uint8), torch.where(has_nan, torch.nan, scale)


def decode_steps(codes: Tensor, scale: Tensor) -> Tensor:
    """The reverse of `encode_steps`."""
    return (codes.float() - 128.0) * scale


def number_of_steps(word: Any, part: int) -> Any:
    """The device function, of equal steps."""
    return ((word >> (8 * part)) & 255) - 128.0


STEPS = KVFormat(
    name="tests:steps", version=1, dtype=torch.uint8, bits=8, scale_dtype=torch.float32,
    groups_per_head=1, encode=encode_steps, decode=decode_steps, error=0.02,
    number=number_of_steps,
)  # fmt: skip


def encode_cubes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Signed cubes of numbers from 0 to 127."""
    has_nan = x.isnan().any(-1, keepdim=True)
    x = x.nan_to_num(0.0).clamp(-1e30, 1e30)
    scale = x.abs().amax(-1, keepdim=True) * (1 / 15.875**3)
    roots = ((x.abs() / scale.clamp(min=1e-37)) ** (1 / 3) * 8.0).round().clamp(0, 127)
    codes = torch.where(scale > 0, roots, 0.0).to(torch.uint8) | (x < 0).to(torch.uint8) << 7
    return codes, torch.where(has_nan, torch.nan, scale)


def decode_cubes(codes: Tensor, scale: Tensor) -> Tensor:
    """The reverse of `encode_cubes`."""
    roots = (codes & 127).float() * 0.125
    cubes = roots * roots * roots
    return torch.where(codes > 127, -cubes, cubes) * scale


def number_of_cubes(word: Any, part: int) -> Any:
    """The device function, which no instructions give."""
    code = (word >> (8 * part)) & 255
    root = (code & 127) * 0.125
    return where(code > 127, -root * root * root, root * root * root)


CUBES = KVFormat(
    name="tests:cubes", version=1, dtype=torch.uint8, bits=8, scale_dtype=torch.float32,
    groups_per_head=1, encode=encode_cubes, decode=decode_cubes, error=0.03,
    number=number_of_cubes,
)  # fmt: skip
