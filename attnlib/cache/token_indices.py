"""Slots of all tokens, or of the new ones, in a row. See `attnlib.cache.indices`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.cache.ragged import (
    check_fits,
    check_indices,
    check_new_tokens,
    check_requests,
    check_rows,
    checked_size,
    concatenated,
    rows_of,
)
from attnlib.cache.token_slots import check_slots
from attnlib.ops.addresses import are_readable, check_lengths

__all__ = [
    "ReadIndices",
    "read_indices_to_token_slots",
    "token_slots_to_read_indices",
    "token_slots_to_write_indices",
    "write_indices_to_token_slots",
]


class ReadIndices(NamedTuple):
    """The slots of all tokens.

    Attributes:
        indices: `[S]`, slots of the tokens of all requests in a row, then -1.
        cu_seqlens: `[R+1]`, offsets of the requests in `indices`.
    """

    indices: Tensor
    cu_seqlens: Tensor


def token_slots_to_read_indices(
    token_slots: Tensor,
    seq_lens: Tensor,
    *,
    max_indices: int | None = None,
    dtype: torch.dtype = torch.int64,
) -> ReadIndices:
    """The slots of all tokens in a row.

    Args:
        token_slots: `[R, max_seq_len]`, the slot of every position.
        seq_lens: `[R]`, tokens of each request.
        max_indices: length of the indices; None means `R * max_seq_len`.
        dtype: dtype of the results.

    Raises:
        ContractError: as `block_table_to_csr`.
    """
    check_indices(dtype, 1, token_slots=(token_slots, 2), seq_lens=(seq_lens, 1))
    check_requests(token_slots=token_slots.shape[0], seq_lens=seq_lens.shape[0])
    check_slots(token_slots, seq_lens, 1)
    size = checked_size("max_indices", max_indices, token_slots)
    if are_readable(seq_lens):
        check_fits(int(seq_lens.sum()), size, "max_indices")
    indices, starts = concatenated(token_slots, seq_lens.long().clamp(min=0), size)
    return ReadIndices(indices.to(dtype), starts.to(dtype))


def read_indices_to_token_slots(
    indices: Tensor, cu_seqlens: Tensor, max_seq_len: int, *, dtype: torch.dtype = torch.int64
) -> Tensor:
    """`[R, max_seq_len]`: the slot of every position; -1 past the end of a request.

    Args:
        indices: `[S]`, slots of the tokens of all requests in a row; entries past `cu_seqlens[R]`
            are ignored.
        cu_seqlens: `[R+1]`, offsets of the requests in `indices`.
        max_seq_len: columns of the result.
        dtype: dtype of the result.

    Raises:
        ContractError: as `block_table_to_csr`.
    """
    check_indices(dtype, 1, indices=(indices, 1), cu_seqlens=(cu_seqlens, 1))
    width = checked_size("max_seq_len", max_seq_len)
    check_rows("cu_seqlens", cu_seqlens, indices.shape[0], width, "max_seq_len")
    return rows_of(indices, cu_seqlens, width, "cu_seqlens").to(dtype)


def token_slots_to_write_indices(
    token_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    *,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """The slots of the new tokens: the last positions of each request. It is a slot mapping (P4).

    Args:
        token_slots: `[R, max_seq_len]`, the slot of every position.
        query_start_loc: `[R+1]`, offsets of the requests in the packed new tokens.
        seq_lens: `[R]`, context plus new tokens.
        num_tokens: length of the result, at least `query_start_loc[R]`.
        dtype: dtype of the result; layers take int64.

    Returns:
        `[num_tokens]`, -1 past `query_start_loc[R]`.

    Raises:
        ContractError: as `block_table_to_csr`.
    """
    rows, width = _check_new(dtype, token_slots, query_start_loc, seq_lens)
    size = checked_size("num_tokens", num_tokens)
    check_new_tokens(query_start_loc, seq_lens, size)
    starts = query_start_loc.long()
    tokens = torch.arange(size, device=token_slots.device)
    if rows == 0 or width == 0:
        return torch.full_like(tokens, -1, dtype=dtype)
    row = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    request = row.clamp(max=rows - 1)
    position = seq_lens.long()[request] - starts[1:][request] + tokens
    exists = (row < rows) & (position >= 0) & (position < width)
    return torch.where(exists, token_slots[request, position.clamp(0, width - 1)], -1).to(dtype)


def write_indices_to_token_slots(
    write_indices: Tensor, query_start_loc: Tensor, seq_lens: Tensor, token_slots: Tensor
) -> Tensor:
    """Token slots with the slots of the new tokens: the last positions of each request.

    Args:
        write_indices: `[T]`, slots of the new tokens; entries past `query_start_loc[R]` are
            ignored.
        query_start_loc: `[R+1]`, offsets of the requests in `write_indices`.
        seq_lens: `[R]`, context plus new tokens.
        token_slots: `[R, max_seq_len]`, the slots of the context. It is not modified.

    Returns:
        `[R, max_seq_len]` in the dtype of `token_slots`.

    Raises:
        ContractError: as `block_table_to_csr`.
    """
    _, width = _check_new(token_slots.dtype, token_slots, query_start_loc, seq_lens)
    check_indices(
        token_slots.dtype, 1, token_slots=(token_slots, 2), write_indices=(write_indices, 1)
    )
    total = write_indices.shape[0]
    check_new_tokens(query_start_loc, seq_lens, total)
    if total == 0:
        return token_slots.clone()
    starts, ends = query_start_loc[:-1].long()[:, None], query_start_loc[1:].long()[:, None]
    positions = torch.arange(width, device=token_slots.device)
    token = positions - seq_lens.long()[:, None] + ends
    is_new = (token >= starts) & (token < ends) & (token < total)
    new = write_indices[token.clamp(0, total - 1)].to(token_slots.dtype)
    return torch.where(is_new, new, token_slots)


def _check_new(
    dtype: torch.dtype, token_slots: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> tuple[int, int]:
    """(R, max_seq_len) of token slots with new tokens."""
    check_indices(
        dtype,
        1,
        token_slots=(token_slots, 2),
        query_start_loc=(query_start_loc, 1),
        seq_lens=(seq_lens, 1),
    )
    rows, width = token_slots.shape
    check_requests(
        token_slots=rows, seq_lens=seq_lens.shape[0], query_start_loc=query_start_loc.shape[0] - 1
    )
    check_lengths("seq_lens", seq_lens, width, "the columns of token_slots")
    return rows, width
