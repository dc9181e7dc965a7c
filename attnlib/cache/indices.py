"""Conversions between the forms in which engines describe where the tokens of a batch are stored.

| form | tensors | used by |
|---|---|---|
| block table | `[R, max_blocks]` block ids | attnlib, vLLM, FlashAttention |
| CSR page lists | `indptr [R+1]`, `indices [P]`, `last_page_len [R]` | FlashInfer |
| token slots | `[R, max_seq_len]`, the slot of every position | SGLang (`req_to_token`) |
| read indices | `[S]` slots of all tokens in a row, `cu_seqlens [R+1]` | transformers, SGLang |
| write indices | `[T]` slots of the new tokens | transformers; the slot mapping (P4) |

R requests; slot = block * block_size + offset. All functions accept int32 and int64, run on the
device of their arguments and never synchronize with it. The sizes of ragged results are therefore
given by the caller or upper bounds, and the rest of a result is filled with -1. Values are not
checked, for the same reason: entries past the end of a table read -1, and entries of a ragged
result past the given size are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.cache.ragged import (
    check_indices,
    check_requests,
    checked_size,
    concatenated,
    rows_of,
)

__all__ = [
    "PageList",
    "ReadIndices",
    "block_table_to_csr",
    "block_table_to_token_slots",
    "csr_seq_lens",
    "csr_to_block_table",
    "csr_to_token_slots",
    "read_indices_to_token_slots",
    "token_slots_to_block_table",
    "token_slots_to_csr",
    "token_slots_to_read_indices",
    "token_slots_to_write_indices",
    "write_indices_to_token_slots",
]


class PageList(NamedTuple):
    """CSR page lists.

    Attributes:
        indptr: `[R+1]`, offsets of the requests in `indices`.
        indices: `[P]`, page ids of all requests in a row, then -1.
        last_page_len: `[R]`, tokens in the last page of each request; 0 for an empty request.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class ReadIndices(NamedTuple):
    """The slots of all tokens.

    Attributes:
        indices: `[S]`, slots of the tokens of all requests in a row, then -1.
        cu_seqlens: `[R+1]`, offsets of the requests in `indices`.
    """

    indices: Tensor
    cu_seqlens: Tensor


def block_table_to_csr(
    block_table: Tensor,
    seq_lens: Tensor,
    block_size: int,
    *,
    max_pages: int | None = None,
    dtype: torch.dtype = torch.int32,
) -> PageList:
    """CSR page lists of a block table.

    Args:
        block_table: `[R, max_blocks]`, block ids.
        seq_lens: `[R]`, tokens of each request.
        block_size: tokens in one block.
        max_pages: length of `indices`; None means `R * max_blocks`.
        dtype: dtype of the results, int32 or int64.

    Raises:
        ContractError: arguments of another shape, dtype or device, or a size below its minimum.
    """
    check_indices(dtype, block_size, block_table=(block_table, 2), seq_lens=(seq_lens, 1))
    check_requests(block_table=block_table.shape[0], seq_lens=seq_lens.shape[0])
    lengths = seq_lens.long().clamp(min=0)
    pages = (lengths + block_size - 1) // block_size
    indices, indptr = concatenated(
        block_table, pages, checked_size("max_pages", max_pages, block_table)
    )
    last = lengths - (pages - 1).clamp(min=0) * block_size
    return PageList(indptr.to(dtype), indices.to(dtype), last.to(dtype))


def csr_to_block_table(
    indptr: Tensor, indices: Tensor, max_blocks: int, *, dtype: torch.dtype = torch.int32
) -> Tensor:
    """The block table of CSR page lists; `csr_seq_lens` has its lengths.

    Args:
        indptr: `[R+1]`, offsets of the requests in `indices`.
        indices: `[P]`, page ids; entries past `indptr[R]` are ignored.
        max_blocks: columns of the table.
        dtype: dtype of the result.

    Returns:
        `[R, max_blocks]`, -1 past the pages of a request.

    Raises:
        ContractError: as `block_table_to_csr`.
    """
    check_indices(dtype, 1, indptr=(indptr, 1), indices=(indices, 1))
    return rows_of(indices, indptr, checked_size("max_blocks", max_blocks), "indptr").to(dtype)


def csr_seq_lens(
    indptr: Tensor, last_page_len: Tensor, block_size: int, *, dtype: torch.dtype = torch.int32
) -> Tensor:
    """`[R]`, tokens of each request of CSR page lists.

    Args:
        indptr: `[R+1]`, offsets of the requests.
        last_page_len: `[R]`, tokens in the last page of each request.
        block_size: tokens in one page.
        dtype: dtype of the result.

    Raises:
        ContractError: as `block_table_to_csr`.
    """
    check_indices(dtype, block_size, indptr=(indptr, 1), last_page_len=(last_page_len, 1))
    check_requests(indptr=indptr.shape[0] - 1, last_page_len=last_page_len.shape[0])
    pages = indptr[1:].long() - indptr[:-1].long()
    lengths = (pages - 1) * block_size + last_page_len.long()
    return torch.where(pages > 0, lengths, 0).to(dtype)


def block_table_to_token_slots(
    block_table: Tensor,
    seq_lens: Tensor,
    block_size: int,
    *,
    max_seq_len: int | None = None,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """The slot of every position.

    Args:
        block_table: `[R, max_blocks]`, block ids.
        seq_lens: `[R]`, tokens of each request.
        block_size: tokens in one block.
        max_seq_len: columns of the result; None means `max_blocks * block_size`.
        dtype: dtype of the result; int32 is enough for a pool of fewer than 2^31 slots.

    Returns:
        `[R, max_seq_len]`, -1 past the end of a request.

    Raises:
        ContractError: as `block_table_to_csr`.
    """
    check_indices(dtype, block_size, block_table=(block_table, 2), seq_lens=(seq_lens, 1))
    check_requests(block_table=block_table.shape[0], seq_lens=seq_lens.shape[0])
    width = block_table.shape[1]
    size = width * block_size if max_seq_len is None else checked_size("max_seq_len", max_seq_len)
    positions = torch.arange(size, device=block_table.device)
    if width == 0:
        return block_table.new_full((block_table.shape[0], size), -1, dtype=dtype)
    columns = positions // block_size
    blocks = block_table[:, columns.clamp(max=width - 1)].long()
    exists = (positions < seq_lens[:, None]) & (columns < width) & (blocks >= 0)
    return torch.where(exists, blocks * block_size + positions % block_size, -1).to(dtype)


def token_slots_to_block_table(
    token_slots: Tensor, seq_lens: Tensor, block_size: int, *, dtype: torch.dtype = torch.int32
) -> Tensor:
    """The block table of token slots. With a block size of 1 it is the token slots themselves.

    Args:
        token_slots: `[R, max_seq_len]`, the slot of every position. The tokens of a block must have
            consecutive slots from a multiple of `block_size` on, as in every paged pool.
        seq_lens: `[R]`, tokens of each request.
        block_size: tokens in one block.
        dtype: dtype of the result.

    Returns:
        `[R, ceil(max_seq_len / block_size)]`, -1 past the blocks of a request.

    Raises:
        ContractError: as `block_table_to_csr`.
    """
    check_indices(dtype, block_size, token_slots=(token_slots, 2), seq_lens=(seq_lens, 1))
    check_requests(token_slots=token_slots.shape[0], seq_lens=seq_lens.shape[0])
    firsts = token_slots[:, ::block_size]
    positions = torch.arange(firsts.shape[1], device=firsts.device) * block_size
    exists = (positions < seq_lens[:, None]) & (firsts >= 0)
    return torch.where(exists, firsts // block_size, -1).to(dtype)


def csr_to_token_slots(
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    block_size: int,
    max_seq_len: int,
    *,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """`[R, max_seq_len]`: the slot of every position of CSR page lists; -1 past the end.

    Args:
        indptr, indices, last_page_len: see `PageList`.
        block_size: tokens in one page.
        max_seq_len: columns of the result.
        dtype: dtype of the result.

    Raises:
        ContractError: as `block_table_to_csr`.
    """
    seq_lens = csr_seq_lens(indptr, last_page_len, block_size)
    max_blocks = -(-checked_size("max_seq_len", max_seq_len) // block_size)
    table = csr_to_block_table(indptr, indices, max_blocks, dtype=torch.int64)
    return block_table_to_token_slots(
        table, seq_lens, block_size, max_seq_len=max_seq_len, dtype=dtype
    )


def token_slots_to_csr(
    token_slots: Tensor,
    seq_lens: Tensor,
    block_size: int,
    *,
    max_pages: int | None = None,
    dtype: torch.dtype = torch.int32,
) -> PageList:
    """CSR page lists of token slots.

    Args:
        token_slots, seq_lens, block_size: as in `token_slots_to_block_table`.
        max_pages, dtype: as in `block_table_to_csr`.

    Raises:
        ContractError: as `block_table_to_csr`.
    """
    table = token_slots_to_block_table(token_slots, seq_lens, block_size, dtype=torch.int64)
    return block_table_to_csr(table, seq_lens, block_size, max_pages=max_pages, dtype=dtype)


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
    size = checked_size("max_indices", max_indices, token_slots)
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
    return rows_of(indices, cu_seqlens, checked_size("max_seq_len", max_seq_len), "cu_seqlens").to(
        dtype
    )


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
    starts = query_start_loc.long()
    tokens = torch.arange(checked_size("num_tokens", num_tokens), device=token_slots.device)
    if rows == 0 or width == 0:
        return torch.full_like(tokens, -1, dtype=dtype)
    row = torch.searchsorted(starts[1:], tokens, right=True)
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
    return rows, width
