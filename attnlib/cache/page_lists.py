"""Block tables and page lists in CSR form. See `attnlib.cache.indices`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.cache.ragged import (
    check_fits,
    check_indices,
    check_requests,
    check_rows,
    checked_size,
    concatenated,
    rows_of,
)
from attnlib.errors import ContractError
from attnlib.ops.addresses import are_readable, check_block_table, check_starts

__all__ = [
    "PageList",
    "block_table_to_csr",
    "csr_seq_lens",
    "csr_to_block_table",
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
    size = checked_size("max_pages", max_pages, block_table)
    check_block_table(block_table, seq_lens, block_size, None)
    lengths = seq_lens.long().clamp(min=0)
    pages = (lengths + block_size - 1) // block_size
    if are_readable(pages):
        check_fits(int(pages.sum()), size, "max_pages")
    indices, indptr = concatenated(block_table, pages, size)
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
    width = checked_size("max_blocks", max_blocks)
    check_rows("indptr", indptr, indices.shape[0], width, "max_blocks")
    return rows_of(indices, indptr, width, "indptr").to(dtype)


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
    check_starts("indptr", indptr, None)
    pages = indptr[1:].long() - indptr[:-1].long()
    _check_last_pages(pages, last_page_len, block_size)
    lengths = (pages - 1) * block_size + last_page_len.long()
    return torch.where(pages > 0, lengths, 0).to(dtype)


def _check_last_pages(pages: Tensor, last: Tensor, block_size: int) -> None:
    """A request with pages has at least one token in its last page."""
    if not are_readable(last):
        return
    wrong = (pages > 0) & ((last < 1) | (last > block_size))
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        raise ContractError(
            f"last_page_len[{request}]={int(last[request])} must be from 1 to "
            f"block_size={block_size}: the last page of a request holds at least one token",
            rule="P3",
        )
