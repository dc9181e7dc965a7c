"""The facts of one batch that every layer and every backend shares, with vLLM v1's names.

Legend: R requests, T tokens of this step, packed without padding between requests, N block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.errors import ContractError

__all__ = ["CommonAttentionMetadata"]

_TableLike = torch.Tensor | Sequence[Sequence[int]]


@dataclass(kw_only=True)
class CommonAttentionMetadata:
    """One batch, shared by layers and backends. Builders turn it into their own metadata.

    Attributes:
        query_start_loc: [R+1] int32 device; where each request's tokens start, the last entry is the number of tokens.
        query_start_loc_cpu: [R+1] int32 CPU; the same.
        seq_lens: [R] int32 device; context plus this step's tokens (M1).
        seq_lens_cpu: [R] int32 CPU; the same.
        num_computed_tokens_cpu: [R] int32 CPU; context alone.
        num_reqs: R.
        num_actual_tokens: T; q, k, v may be longer (padding of a graph).
        max_query_len: longest query; an upper bound will do.
        max_seq_len: longest sequence; an upper bound will do.
        block_table_tensor: [R, max_blocks] int32 device (P3); None where nothing is cached (encoders).
        slot_mapping: [>= T] int64 device (P4); rows at or past T are filled with -1. None where nothing is cached.
        causal: True, False, or a bool per request ([R] device). None leaves it to the layer's spec.
        query_bias: [T, >= max_query_len] float32 device; column j is added to the score of the j-th new token of the row's request, -inf hides it.
        is_cross_attention: the sequences are another modality's (encoder output): queries are no part of them.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    num_computed_tokens_cpu: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor | None = None
    slot_mapping: torch.Tensor | None = None
    causal: bool | torch.Tensor | None = None
    query_bias: torch.Tensor | None = None
    is_cross_attention: bool = False

    def __post_init__(self) -> None:
        if self.slot_mapping is not None and self.slot_mapping.shape[0] > self.num_actual_tokens:
            self.slot_mapping[self.num_actual_tokens :].fill_(-1)

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: _TableLike | None = None,
        block_size: int | None = None,
        device: torch.device | str | None = None,
        *,
        causal: bool | torch.Tensor | None = None,
        query_bias: torch.Tensor | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        is_cross_attention: bool = False,
    ) -> CommonAttentionMetadata:
        """A batch from plain lists.

        Args:
            query_lens: new tokens of each request, 0 or more.
            seq_lens: context plus new tokens of each request (M1).
            block_table: rows of block ids, ragged lists or a tensor `[R, max_blocks]`; None where nothing is cached.
            block_size: tokens in one block; needed with a table.
            device: where the kernels run; None is torch's default device.
            causal, query_bias, is_cross_attention: as the attributes.
            max_query_len, max_seq_len: upper bounds to report instead of the true maxima (CUDA graphs).

        Raises:
            ContractError: lengths that do not fit each other, or a table too narrow for them; the message names the request.
        """
        queries, sequences = _checked_lengths(query_lens, seq_lens, is_cross_attention)
        starts = torch.zeros(len(queries) + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(queries, 0, out=starts[1:])
        device = torch.get_default_device() if device is None else torch.device(device)
        table = slots = None
        if block_table is not None:
            if block_size is None or block_size < 1:
                raise ContractError(
                    f"block_size={block_size} must be given with a block table, and be at least 1"
                )
            table, slots = _place(
                block_table,
                starts,
                queries,
                sequences,
                block_size,
                device,
                write=not is_cross_attention,
            )
        return cls(
            query_start_loc=starts.to(device, non_blocking=True),
            query_start_loc_cpu=starts,
            seq_lens=sequences.to(device, non_blocking=True),
            seq_lens_cpu=sequences,
            num_computed_tokens_cpu=(sequences - queries).clamp(min=0),
            num_reqs=len(queries),
            num_actual_tokens=int(starts[-1]),
            max_query_len=_largest(queries) if max_query_len is None else max_query_len,
            max_seq_len=_largest(sequences) if max_seq_len is None else max_seq_len,
            block_table_tensor=table,
            slot_mapping=slots,
            causal=causal,
            query_bias=query_bias,
            is_cross_attention=is_cross_attention,
        )

    @property
    def query_lens_cpu(self) -> torch.Tensor:
        """[R] int32 CPU; new tokens of each request."""
        return self.query_start_loc_cpu[1:] - self.query_start_loc_cpu[:-1]

    @property
    def batch_size(self) -> int:
        """R."""
        return self.num_reqs

    def compute_num_computed_tokens(self) -> torch.Tensor:
        """[R] int32 device; context alone, without a host sync."""
        return self.seq_lens - (self.query_start_loc[1:] - self.query_start_loc[:-1])

    def replace(self, **changes: Any) -> CommonAttentionMetadata:
        """A copy with some fields changed; tensors are shared."""
        return replace(self, **changes)

    def unpadded(self, num_reqs: int, num_actual_tokens: int) -> CommonAttentionMetadata:
        """The first `num_reqs` requests of a batch that was padded for a CUDA graph; tensors are views."""
        return replace(
            self,
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=self.query_start_loc_cpu[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
            seq_lens_cpu=self.seq_lens_cpu[:num_reqs],
            num_computed_tokens_cpu=self.num_computed_tokens_cpu[:num_reqs],
            num_reqs=num_reqs,
            num_actual_tokens=num_actual_tokens,
            block_table_tensor=None
            if self.block_table_tensor is None
            else self.block_table_tensor[:num_reqs],
            slot_mapping=None
            if self.slot_mapping is None
            else self.slot_mapping[:num_actual_tokens],
            causal=self.causal[:num_reqs] if isinstance(self.causal, torch.Tensor) else self.causal,
            query_bias=None if self.query_bias is None else self.query_bias[:num_actual_tokens],
        )


def _checked_lengths(
    query_lens: Sequence[int], seq_lens: Sequence[int], is_cross_attention: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, sequences = (
        torch.as_tensor(lengths, dtype=torch.int32, device="cpu").reshape(-1)
        for lengths in (query_lens, seq_lens)
    )
    if queries.shape != sequences.shape:
        raise ContractError(
            f"{len(queries)} query_lens and {len(sequences)} seq_lens: every request needs one of each",
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
            f"seq_lens[{request}]={sequences[request]} is below query_lens[{request}]={queries[request]}: seq_lens count context and new tokens",
            rule="M1",
        )
    return queries, sequences


def _place(
    block_table: _TableLike,
    starts: torch.Tensor,
    queries: torch.Tensor,
    sequences: torch.Tensor,
    block_size: int,
    device: torch.device,
    *,
    write: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The table on the device, and the slot of every new token (none is written for another modality's sequences)."""
    if isinstance(block_table, torch.Tensor) and block_table.device.type != "cpu":
        from attnlib.cache.slots import compute_slot_mapping

        table = block_table.to(device=device, dtype=torch.int32)
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
            f"block_table[{request[token]}][{position[token] // block_size}]={blocks[token]} is no block, but request {request[token]} "
            f"writes position {position[token]} to it",
            rule="P3",
        )
    return table, (blocks * block_size + position % block_size).to(device, non_blocking=True)


def _dense(block_table: _TableLike, sequences: torch.Tensor, block_size: int) -> torch.Tensor:
    if isinstance(block_table, torch.Tensor):
        return block_table.to(torch.int32).contiguous()
    if len(block_table) != len(sequences):
        raise ContractError(
            f"block_table has {len(block_table)} rows for {len(sequences)} requests", rule="P3"
        )
    for request, row in enumerate(block_table):
        if len(row) * block_size < sequences[request]:
            raise ContractError(
                _too_narrow(request, len(row), int(sequences[request]), block_size), rule="P3"
            )
    width = max((len(row) for row in block_table), default=0)
    rows = [[*row, *[-1] * (width - len(row))] for row in block_table]
    return torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(len(rows), width)


def _check_width(shape: Sequence[int], sequences: torch.Tensor, block_size: int) -> None:
    if len(shape) != 2 or shape[0] != len(sequences):
        raise ContractError(
            f"block_table has shape {tuple(shape)}; it must be [{len(sequences)} requests, max_blocks]",
            rule="P3",
        )
    if len(sequences) and int(sequences.max()) > shape[1] * block_size:
        request = int(sequences.argmax())
        raise ContractError(
            _too_narrow(request, shape[1], int(sequences[request]), block_size), rule="P3"
        )


def _too_narrow(request: int, columns: int, seq_len: int, block_size: int) -> str:
    need = -(-seq_len // block_size)
    return f"block_table row {request} has {columns} entries, but seq_lens[{request}]={seq_len} needs {need} blocks of {block_size} tokens"


def _largest(lengths: torch.Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _first(flags: torch.Tensor) -> int:
    return int(flags.int().argmax())
