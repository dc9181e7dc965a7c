"""Packed latents (P14): 656 bytes per token, as FlashMLA and vLLM (`fp8_ds_mla`) store them.

512 float8_e4m3fn elements, 4 float32 scales of 128 elements each, and the rotary part of 64
bfloat16 elements. An element times its scale is the real value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.addresses import (
    are_readable,
    as_count,
    check_block_table,
    check_slot_values,
    check_starts,
)
from attnlib.ops.checks import check_slots

__all__ = [
    "BYTES",
    "GROUP",
    "LATENT",
    "LARGEST",
    "ROTARY",
    "SMALLEST_SCALE",
    "PackedViews",
    "check_batch",
    "check_latents",
    "check_queries",
    "check_query",
    "packed_views",
]

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


def check_latents(latents: Tensor, data: Tensor, slot_mapping: Tensor) -> None:
    """Check a write of packed latents, before anything is written.

    Raises:
        ContractError: latents of another shape or dtype, slots that are not int64, fewer latents
            than slots, several devices, or, on a CPU, a slot past the cache.
    """
    if (
        latents.dim() != 2
        or latents.shape[1] != LATENT + ROTARY
        or latents.dtype not in (torch.float16, torch.bfloat16, torch.float32)
    ):
        raise ContractError(
            f"latents are {latents.dtype} {tuple(latents.shape)}; they must be float16, bfloat16 "
            f"or float32 [tokens, {LATENT + ROTARY}]",
            rule="P14",
        )
    check_slots(latents, latents, slot_mapping)
    _check_devices(data, latents=latents, slot_mapping=slot_mapping)
    check_slot_values(slot_mapping, data.shape[0] * data.shape[1])


def check_batch(
    query: Tensor,
    data: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    lse: Tensor | None,
) -> None:
    """Check the batch of attention over packed latents, before anything is written.

    Raises:
        ContractError: tensors of other shapes, dtypes or devices; on a CPU also offsets that
            decrease or end past the queries, and blocks outside of the cache.
    """
    as_count("max_seq_len", max_seq_len)
    requests = seq_lens.shape[0] if seq_lens.dim() else 0
    for name, tensor, shape in (
        ("block_table", block_table, (requests, *block_table.shape[1:2])),
        ("query_start_loc", query_start_loc, (requests + 1,)),
        ("seq_lens", seq_lens, (requests,)),
    ):
        dims = 2 if name == "block_table" else 1
        if tensor.dtype != torch.int32 or tensor.dim() != dims or tensor.shape != shape:
            raise ContractError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be torch.int32 "
                f"{'[R, blocks]' if dims == 2 else list(shape)} for the {requests} requests of "
                "seq_lens",
                rule="P3",
            )
    if lse is not None and (lse.shape != query.shape[:2] or lse.dtype != torch.float32):
        raise ContractError(
            f"lse is {lse.dtype} {tuple(lse.shape)}; it must be torch.float32 "
            f"{list(query.shape[:2])}",
            rule="M5",
        )
    _check_devices(
        data,
        query=query,
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        lse=lse,
    )
    check_starts("query_start_loc", query_start_loc, query.shape[0])
    check_block_table(block_table, seq_lens, data.shape[1], data.shape[0])
    if requests and are_readable(seq_lens) and int(seq_lens.max()) > max_seq_len:
        raise ContractError(
            f"seq_lens[{int(seq_lens.argmax())}]={int(seq_lens.max())} exceeds "
            f"max_seq_len={max_seq_len}",
            rule="M1",
        )


def _check_devices(data: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != data.device:
            raise ContractError(
                f"{name} is on {tensor.device}, the packed latents on {data.device}: all tensors "
                "of a call must be on one device"
            )


def check_query(query: Tensor) -> None:
    """Check the queries of attention over packed latents.

    Raises:
        ContractError: another shape or dtype.
    """
    if query.dim() != 3 or query.shape[2] != LATENT + ROTARY:
        raise ContractError(
            f"query is {tuple(query.shape)}; packed latents need [tokens, heads, "
            f"{LATENT + ROTARY}]",
            rule="M12",
        )
    if query.stride(2) != 1:
        raise ContractError(
            f"query has last stride {query.stride(2)}; it must be 1: call .contiguous()", rule="P9"
        )
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ContractError(
            f"query is {query.dtype}; packed latents need float16, bfloat16 or float32", rule="M12"
        )


def check_queries(query: Tensor, out: Tensor) -> None:
    """Check the queries and the output of attention over packed latents.

    Raises:
        ContractError: other sizes or dtypes.
    """
    check_query(query)
    expected = (*query.shape[:2], LATENT)
    if out.shape != expected or out.dtype != query.dtype:
        raise ContractError(
            f"query is {query.dtype} {tuple(query.shape)} and out {out.dtype} {tuple(out.shape)}; "
            f"packed latents need an output {list(expected)} in the dtype of the queries",
            rule="M12",
        )
