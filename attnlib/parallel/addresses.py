"""Addresses on one rank: lengths, block tables and slots (X2, X3).

All functions are tensor operations on the device of their arguments and wait for nothing. Tokens
are packed: R requests, T new tokens, N tokens per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.parallel.divisions import Division

__all__ = ["TokenPositions", "local_block_table", "local_slots", "table_of", "token_positions"]

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


class TokenPositions(NamedTuple):
    """Where the new tokens of a batch are.

    Attributes:
        request: `[T]` int64, the request of each token.
        position: `[T]` int32, its position in the request (M1); -1 for rows past the last request.
    """

    request: Tensor
    position: Tensor


def table_of(rows: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """A block table `[R, columns]` int32, from a tensor of integers or from lists of any lengths.

    Raises:
        ContractError: another number of dimensions, or elements that are not integers.
    """
    if not isinstance(rows, Tensor):
        try:
            width = max((len(row) for row in rows), default=0)
            padded = [[*row, *[0] * (width - len(row))] for row in rows]
            rows = torch.as_tensor(padded, device="cpu").reshape(len(padded), width)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ContractError(
                f"block_table={rows!r} must be a tensor or lists of block ids: {error}", rule="P3"
            ) from None
    if rows.dim() != 2 or (rows.numel() and rows.dtype not in _INTEGERS):
        raise ContractError(
            f"block_table is {rows.dtype} {list(rows.shape)}; it must be integers [requests, "
            "columns]",
            rule="P3",
        )
    if rows.dtype == torch.int64:  # an id that int32 cannot hold must not become another
        limits = torch.iinfo(torch.int32)
        rows = rows.clamp(limits.min, limits.max)
    return rows.to(torch.int32)


def token_positions(query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int) -> TokenPositions:
    """The request and the position of each new token.

    Args:
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32, context plus new tokens, of all ranks.
        num_tokens: T.
    """
    token = torch.arange(num_tokens, dtype=torch.int32, device=seq_lens.device)
    if seq_lens.shape[0] == 0:
        return TokenPositions(token.long(), torch.full_like(token, -1))
    ends = query_start_loc[1:]
    request = torch.searchsorted(ends, token, right=True).clamp_(max=seq_lens.shape[0] - 1)
    position = seq_lens[request] - ends[request] + token
    return TokenPositions(request, torch.where(token < ends[-1], position, -1))


def local_slots(
    division: Division, rank: int, tokens: TokenPositions, block_table: Tensor, block_size: int
) -> Tensor:
    """The slots of the new tokens on a rank (P4), `[T]` int64; -1 for tokens of other ranks.

    Args:
        division: of the positions.
        rank: in the group.
        tokens: of the batch.
        block_table: `[R, columns]` int32, the blocks of the local indices of each request on this
            rank: entry j holds the local indices `[j * N, (j + 1) * N)`.
        block_size: N.

    Raises:
        ContractError: a rank that the division does not have.
    """
    _check_rank(division, rank)
    position = tokens.position.clamp(min=0)
    local = division.local(position).long()
    own = (division.owner(position) == rank) & (tokens.position >= 0)
    if block_table.numel() == 0:
        return torch.full_like(local, -1)
    column = (local // block_size).clamp(max=block_table.shape[1] - 1)
    block = block_table[tokens.request, column].long()
    return torch.where(own, block * block_size + local % block_size, -1)


def local_block_table(
    division: Division, rank: int, block_table: Tensor | Sequence[Sequence[int]], block_size: int
) -> Tensor:
    """The columns of a global block table that a rank holds, `[R, columns of the rank]`.

    Engines that give every rank the same table, as vLLM does, have a table of local indices already
    and do not call this.

    Args:
        division: of the positions; its runs are whole blocks.
        rank: in the group.
        block_table: `[R, columns]` int32, or lists; entry j holds the positions
            `[j * N, (j + 1) * N)`.
        block_size: N.

    Raises:
        ContractError: a run of the division is not a multiple of the block size, or a rank that the
            division does not have.
    """
    _check_rank(division, rank)
    block_table = table_of(block_table)
    if division.run_length % block_size:
        raise ContractError(
            f"{division} divides blocks of {block_size} tokens: make its runs a multiple of "
            f"{block_size}, or give each rank a table of its local indices",
            rule="X2",
        )
    count = division.count(block_table.shape[1] * block_size, rank) // block_size
    first = torch.arange(count, device=block_table.device) * block_size
    columns: Tensor = division.position(first, rank) // block_size
    return block_table[:, columns]


def _check_rank(division: Division, rank: int) -> None:
    if rank not in range(division.world_size):
        raise ContractError(
            f"rank={rank} must be from 0 to {division.world_size - 1}, the last rank of {division}",
            rule="X1",
        )
