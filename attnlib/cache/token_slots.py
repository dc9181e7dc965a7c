"""The slot of every position, to and from tables and page lists. See `attnlib.cache.indices`."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.cache.page_lists import PageList, block_table_to_csr, csr_seq_lens, csr_to_block_table
from attnlib.cache.ragged import (
    check_indices,
    check_requests,
    checked_size,
)
from attnlib.errors import ContractError
from attnlib.ops.addresses import are_readable, check_block_table, check_lengths

__all__ = [
    "block_table_to_token_slots",
    "check_slots",
    "csr_to_token_slots",
    "token_slots_to_block_table",
    "token_slots_to_csr",
]


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
    check_block_table(block_table, seq_lens, block_size, None)
    check_lengths("seq_lens", seq_lens, size, "max_seq_len")
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
    check_slots(token_slots, seq_lens, block_size)
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


def check_slots(token_slots: Tensor, seq_lens: Tensor, block_size: int) -> None:
    """Whether the tokens of a request have slots, and those of a block consecutive ones.

    Raises:
        ContractError: names the first other slot.
    """
    width = token_slots.shape[1]
    check_lengths("seq_lens", seq_lens, width, "the columns of token_slots")
    if not are_readable(token_slots):
        return
    positions = torch.arange(width, device=token_slots.device)
    used = positions < seq_lens[:, None]
    firsts = token_slots[:, positions // block_size * block_size]
    expected = torch.div(firsts, block_size, rounding_mode="floor") * block_size
    wrong = used & ((token_slots < 0) | (token_slots != expected + positions % block_size))
    if bool(wrong.any()):
        request, position = wrong.nonzero()[0].tolist()
        raise ContractError(
            f"token_slots[{request}][{position}]={int(token_slots[request, position])}: a token "
            "needs a slot, and the tokens of a block consecutive ones from a multiple of "
            f"block_size={block_size} on",
            rule="P4",
        )
