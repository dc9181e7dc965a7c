"""Slot mapping of new tokens: slot = block * block_size + offset (P4)."""

from __future__ import annotations

from importlib import import_module

import torch

from attnlib.cache.ragged import check_indices, check_new_tokens
from attnlib.errors import ContractError
from attnlib.ops.addresses import as_count, check_block_table
from attnlib.ops.dispatch import runs_kernels

__all__ = ["compute_slot_mapping"]


def compute_slot_mapping(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_tokens: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slot of every query token of a batch.

    Args:
        query_start_loc: `[R+1]` int32, offsets of the requests in the packed tokens.
        seq_lens: `[R]` int32, context plus new tokens (M1).
        block_table: `[R, max_blocks]` int32 (P3).
        block_size: tokens in one block.
        num_tokens: length of the result; None reads it from `query_start_loc`, which synchronizes
            with a CUDA device.
        out: `[num_tokens]` int64 that receives the result; None allocates it.

    Returns:
        `[num_tokens]` int64; entries at or past the end of the last request are -1, which writes
        nothing.

    Raises:
        ContractError: `block_size` is below 1, or shapes, dtypes or devices disagree; on a CPU and
            under ATTNLIB_VALIDATE also offsets that decrease or exceed `num_tokens`, requests with
            fewer tokens than new ones, and rows that are too short or name no block.
    """
    _check_forms(query_start_loc, seq_lens, block_table, block_size)
    num_tokens = int(query_start_loc[-1]) if num_tokens is None else num_tokens
    as_count("num_tokens", num_tokens)
    _check_out(out, num_tokens, query_start_loc.device)
    check_new_tokens(query_start_loc, seq_lens, num_tokens)
    check_block_table(block_table, seq_lens, block_size, None)
    counterpart = "triton" if runs_kernels(block_table.device) else "torch"
    kernels = import_module(f"attnlib.ops.{counterpart}.slots")
    slots: torch.Tensor = kernels.compute_slot_mapping(
        query_start_loc, seq_lens, block_table, block_size, num_tokens, out=out
    )
    return slots


def _check_forms(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> None:
    as_count("block_size", block_size, 1)
    check_indices(
        torch.int64,
        block_size,
        query_start_loc=(query_start_loc, 1),
        seq_lens=(seq_lens, 1),
        block_table=(block_table, 2),
    )
    if (
        block_table.dim() != 2
        or block_table.shape[0] != seq_lens.shape[0]
        or query_start_loc.shape[0] != seq_lens.shape[0] + 1
    ):
        raise ContractError(
            f"block_table {tuple(block_table.shape)}, seq_lens {tuple(seq_lens.shape)} "
            f"and query_start_loc {tuple(query_start_loc.shape)} must be "
            f"[R, max_blocks], [R] and [R+1]",
            rule="P3",
        )


def _check_out(out: torch.Tensor | None, num_tokens: int, device: torch.device) -> None:
    if out is not None and (
        out.shape != (num_tokens,) or out.dtype != torch.int64 or out.device != device
    ):
        raise ContractError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}; it must be torch.int64 "
            f"[{num_tokens}] on {device}",
            rule="P4",
        )
