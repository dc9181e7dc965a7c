"""Packed latents (P14): 656 bytes per token, as FlashMLA and vLLM (`fp8_ds_mla`) store them.

512 float8_e4m3fn elements, 4 float32 scales of 128 elements each, and the rotary part of 64
bfloat16 elements. An element times its scale is the real value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.errors import ContractError

__all__ = [
    "BYTES", "GROUP", "LATENT", "LARGEST", "ROTARY", "SMALLEST_SCALE", "PackedViews",
    "check_queries", "packed_views",
]  # fmt: skip

LATENT, ROTARY, GROUP = 512, 64, 128
"""Elements of a latent, of its rotary part, and of a group with one scale."""
BYTES = LATENT + LATENT // GROUP * 4 + ROTARY * 2
"""Bytes of one token: 656."""
LARGEST = 448.0
"""The largest float8_e4m3fn number; a scale is the largest magnitude of its group divided by it."""
SMALLEST_SCALE = 2.0**-126
"""Scale of a group whose elements are all 0 or smaller than this times `LARGEST`."""


class PackedViews(NamedTuple):
    """The parts of a packed cache, as views.

    Attributes:
        elements: `[B, N, 512]` float8_e4m3fn.
        scales: `[B, N, 4]` float32.
        rotary: `[B, N, 64]` bfloat16.
    """

    elements: Tensor
    scales: Tensor
    rotary: Tensor


def packed_views(data: Tensor) -> PackedViews:
    """The parts of a packed cache.

    Args:
        data: `[B, N, 656]` uint8; the bytes of a token are consecutive, and tokens begin at
            multiples of 16 bytes.

    Raises:
        ContractError: another dtype, shape or alignment.
    """
    if data.dtype != torch.uint8 or data.dim() != 3 or data.shape[2] != BYTES:
        raise ContractError(
            f"packed latents are {data.dtype} {tuple(data.shape)}; they must be torch.uint8 "
            f"[blocks, block size, {BYTES}]",
            rule="P14",
        )
    strides = data.stride()
    misplaced = data.data_ptr() % 16 if not data.is_meta else 0
    if strides[2] != 1 or strides[0] % 16 or strides[1] % 16 or misplaced:
        raise ContractError(
            f"packed latents have strides {strides} and start at {misplaced} modulo 16; the bytes "
            "of a token must be consecutive and begin at a multiple of 16",
            rule="P14",
        )
    scales_end = LATENT + LATENT // GROUP * 4
    return PackedViews(
        data[..., :LATENT].view(torch.float8_e4m3fn),
        data[..., LATENT:scales_end].view(torch.float32),
        data[..., scales_end:].view(torch.bfloat16),
    )


def check_queries(query: Tensor, out: Tensor) -> None:
    """Check the queries and the output of attention over packed latents.

    Raises:
        ContractError: other sizes or dtypes.
    """
    expected = (*query.shape[:2], LATENT)
    if query.dim() != 3 or query.shape[2] != LATENT + ROTARY or out.shape != expected:
        raise ContractError(
            f"query is {tuple(query.shape)} and out {tuple(out.shape)}; packed latents need "
            f"[tokens, heads, {LATENT + ROTARY}] and [tokens, heads, {LATENT}]",
            rule="M12",
        )
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32) or (
        out.dtype != query.dtype
    ):
        raise ContractError(
            f"query is {query.dtype} and out {out.dtype}; packed latents need two equal ones of "
            "float16, bfloat16 and float32",
            rule="M12",
        )
