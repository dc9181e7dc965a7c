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
from attnlib.ops.addresses import as_count, as_id
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

    Raises:
        ContractError: other shapes or dtypes, tensors of two devices, or T that is no count.
    """
    num_tokens = as_count("num_tokens", num_tokens)
    for name, lengths in (("query_start_loc", query_start_loc), ("seq_lens", seq_lens)):
        if not isinstance(lengths, Tensor) or lengths.dtype != torch.int32 or lengths.dim() != 1:
            raise ContractError(f"{_form(name, lengths)}; it must be int32 of one dimension")
    if len(query_start_loc) != len(seq_lens) + 1 or query_start_loc.device != seq_lens.device:
        raise ContractError(
            f"{_form('query_start_loc', query_start_loc)}, {_form('seq_lens', seq_lens)}: pass "
            "[R + 1] and [R], on one device",
            rule="M1",
        )
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
        ContractError: a rank that the division does not have, a block size below 1, or tokens and a
            table of other types.
    """
    block_size = _checked(division, rank, block_size)
    if not isinstance(tokens, TokenPositions):
        kind = type(tokens).__name__
        raise ContractError(f"tokens is a {kind}; pass the TokenPositions of token_positions")
    is_table = isinstance(block_table, Tensor) and block_table.dim() == 2
    if not is_table or block_table.dtype not in _INTEGERS:
        raise ContractError(
            f"{_form('block_table', block_table)}; it must be integers [requests, columns]",
            rule="X2",
        )
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
    block_size = _checked(division, rank, block_size)
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


def _form(name: str, value: object) -> str:
    if not isinstance(value, Tensor):
        return f"{name} is a {type(value).__name__}"
    return f"{name} is {value.dtype} {list(value.shape)} on {value.device}"


def _checked(division: Division, rank: int, block_size: int) -> int:
    """The block size, after checks of the others."""
    if not isinstance(division, Division):
        raise ContractError(
            f"division is a {type(division).__name__}; pass attnlib.parallel.Interleaved(ranks), "
            "or another Division",
            rule="X1",
        )
    if as_id("rank", rank) not in range(division.world_size):
        raise ContractError(
            f"rank={rank} must be from 0 to {division.world_size - 1}, the last rank of {division}",
            rule="X1",
        )
    return as_count("block_size", block_size, 1)
