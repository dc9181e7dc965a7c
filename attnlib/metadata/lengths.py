"""Lengths and block tables as lists or tensors of any integer dtype: checks and conversion."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnlib.errors import ContractError
from attnlib.metadata.int32 import INT32, int32_values
from attnlib.ops.addresses import as_id

__all__ = [
    "TableLike",
    "checked_lengths",
    "largest",
    "new_keys",
    "table_and_slots",
    "upper_bound",
]

TableLike = torch.Tensor | Sequence[Sequence[int]]


def checked_lengths(
    query_lens: Sequence[int], seq_lens: Sequence[int], is_cross_attention: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and sequence lengths, `[R]` int32 on the CPU.

    Raises:
        ContractError: a length that is negative or no integer, sums that exceed int32, or a
            sequence that is shorter than its new tokens (self attention).
    """
    queries = int32_values("query_lens", query_lens, "M1").reshape(-1)
    sequences = int32_values("seq_lens", seq_lens, "M1").reshape(-1)
    total = int(queries.sum())
    if total > INT32.max:
        raise ContractError(
            f"query_lens sum to {total}, but query_start_loc is int32 (at most {INT32.max}): "
            "split the batch",
            rule="M1",
        )
    if queries.shape != sequences.shape:
        raise ContractError(
            f"{len(queries)} query_lens and {len(sequences)} seq_lens: every request needs one of "
            "each",
            rule="M1",
        )
    for name, lengths in (("query_lens", queries), ("seq_lens", sequences)):
        if bool((lengths < 0).any()):
            request = _first(lengths < 0)
            raise ContractError(
                f"{name}[{request}]={lengths[request]} must not be negative", rule="M7"
            )
    short = sequences < queries
    if not is_cross_attention and short.any():
        request = _first(short)
        raise ContractError(
            f"seq_lens[{request}]={sequences[request]} is below "
            f"query_lens[{request}]={queries[request]}: seq_lens count context and new tokens",
            rule="M1",
        )
    return queries, sequences


def new_keys(
    starts: torch.Tensor,
    queries: torch.Tensor,
    sequences: torch.Tensor,
    is_cross_attention: bool,
    new_key_lens: Sequence[int] | None,
    has_table: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets `[R+1]`, lengths `[R]`) of the keys that a batch writes.

    Raises:
        ContractError: lengths of new keys that do not fit the sequences, or without cross-attention
            or a block table.
    """
    if new_key_lens is None:
        return starts, queries
    if not is_cross_attention or not has_table:
        raise ContractError(
            "new_key_lens is for cross-attention with a block table: other batches write the keys "
            "of their query_lens"
        )
    new = int32_values("new_key_lens", new_key_lens, "M1").reshape(-1)
    if new.shape != sequences.shape:
        raise ContractError(f"{len(new)} new_key_lens for {len(sequences)} requests", rule="M1")
    wrong = (new < 0) | (new > sequences)
    if bool(wrong.any()):
        request = _first(wrong)
        raise ContractError(
            f"new_key_lens[{request}]={new[request]} must be from 0 to "
            f"seq_lens[{request}]={sequences[request]}",
            rule="M1",
        )
    key_starts = torch.zeros_like(starts)
    torch.cumsum(new, 0, out=key_starts[1:])
    return key_starts, new


def table_and_slots(
    block_table: TableLike,
    starts: torch.Tensor,
    queries: torch.Tensor,
    sequences: torch.Tensor,
    block_size: int | None,
    device: torch.device,
    *,
    write: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The block table on the device, and the slots of the new tokens (None unless `write`).

    Raises:
        ContractError: no block size, or a table that is too narrow or holds no int32 ids where it
            is read.
    """
    if block_size is None or (block_size := as_id("block_size", block_size)) < 1:
        raise ContractError(
            f"block_size={block_size} must be given with a block table, and be at least 1"
        )
    if isinstance(block_table, torch.Tensor) and block_table.device.type != "cpu":
        from attnlib.cache.slots import compute_slot_mapping

        # Values on the device are not read. An id that int32 cannot hold must not become another.
        table = block_table.clamp(INT32.min, INT32.max).to(device=device, dtype=torch.int32)
        _check_width(table.shape, sequences, block_size)
        if not write:
            return table, None
        start, seq = (lengths.to(device, non_blocking=True) for lengths in (starts, sequences))
        return table, compute_slot_mapping(start, seq, table, block_size, int(starts[-1]))
    rows = _dense(block_table, sequences, block_size)
    _check_width(rows.shape, sequences, block_size)
    table = rows.to(device, non_blocking=True)
    if not write:
        return table, None
    request = torch.repeat_interleave(torch.arange(len(queries), device="cpu"), queries.long())
    position = (
        torch.arange(len(request), device="cpu") + (sequences - queries - starts[:-1])[request]
    )
    blocks = rows[request, position // block_size].long()
    if bool((blocks < 0).any()):
        token = _first(blocks < 0)
        raise ContractError(
            f"block_table[{request[token]}][{position[token] // block_size}]={blocks[token]} "
            f"is not a block, but request {request[token]} writes position {position[token]} to it",
            rule="P3",
        )
    return table, (blocks * block_size + position % block_size).to(device, non_blocking=True)


def _dense(block_table: TableLike, sequences: torch.Tensor, block_size: int) -> torch.Tensor:
    if isinstance(block_table, torch.Tensor):
        return _dense_tensor(block_table, sequences, block_size)
    try:
        counts = [len(row) for row in block_table]
    except TypeError:
        raise ContractError(
            f"block_table={block_table!r} must be a tensor [R, max_blocks], or a list of block ids "
            "for each request",
            rule="P3",
        ) from None
    if len(counts) != len(sequences):
        raise ContractError(
            f"block_table has {len(counts)} rows for {len(sequences)} requests", rule="P3"
        )
    for request, count in enumerate(counts):
        if count * block_size < sequences[request]:
            raise ContractError(
                _too_narrow(request, count, int(sequences[request]), block_size), rule="P3"
            )
    width = max(counts, default=0)
    rows = [[*row, *[-1] * (width - len(row))] for row in block_table]
    return int32_values("block_table", rows, "P3").reshape(len(rows), width)


def _dense_tensor(
    block_table: torch.Tensor, sequences: torch.Tensor, block_size: int
) -> torch.Tensor:
    if block_table.dtype == torch.int64 and block_table.dim() == 2:
        # Entries past the end of a row may hold anything (P3), ids that int32 cannot hold included.
        columns = torch.arange(block_table.shape[1], device="cpu")
        used = columns * block_size < sequences[:, None]
        if used.shape == block_table.shape:
            int32_values("block_table", torch.where(used, block_table, 0), "P3")
        block_table = block_table.clamp(INT32.min, INT32.max)
        return block_table.to(torch.int32).contiguous()
    return int32_values("block_table", block_table, "P3").contiguous()


def _check_width(shape: Sequence[int], sequences: torch.Tensor, block_size: int) -> None:
    if len(shape) != 2 or shape[0] != len(sequences):
        raise ContractError(
            f"block_table has shape {tuple(shape)}; it must be "
            f"[{len(sequences)} requests, max_blocks]",
            rule="P3",
        )
    if len(sequences) and int(sequences.max()) > shape[1] * block_size:
        request = int(sequences.argmax())
        raise ContractError(
            _too_narrow(request, shape[1], int(sequences[request]), block_size), rule="P3"
        )


def _too_narrow(request: int, columns: int, seq_len: int, block_size: int) -> str:
    need = -(-seq_len // block_size)
    return (
        f"block_table row {request} has {columns} entries, but seq_lens[{request}]={seq_len} needs "
        f"{need} blocks of {block_size} tokens"
    )


def largest(lengths: torch.Tensor) -> int:
    """The largest length; 0 if there is none."""
    return int(lengths.max()) if lengths.numel() else 0


def upper_bound(name: str, bound: int | None, lengths_name: str, lengths: torch.Tensor) -> int:
    """A given upper bound of the lengths, or the largest one.

    Raises:
        ContractError: a bound below a length.
    """
    longest = largest(lengths)
    if bound is None:
        return longest
    bound = as_id(name, bound)
    if bound < longest:
        request = int(lengths.argmax())
        raise ContractError(
            f"{name}={bound} is below {lengths_name}[{request}]={longest}: it must be an upper "
            "bound",
            rule="M1",
        )
    return bound


def _first(flags: torch.Tensor) -> int:
    return int(flags.int().argmax())
