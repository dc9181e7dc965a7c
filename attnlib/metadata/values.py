"""Values of a batch that contradict each other (ATTNLIB_VALIDATE=1). `docs/validation.md` lists
them.

A builder checks the batch that it is given, and a layer the metadata of its call, because tensors
may change between the two. Both read the same fields.
"""

from __future__ import annotations

import torch

from attnlib.errors import ContractError
from attnlib.metadata.batch_values import BatchValues

__all__ = ["check_values"]


def check_values(batch: BatchValues) -> None:
    """Raise for the first contradiction.

    Raises:
        ContractError: the message names the tensor, the request or token, the value and the limit.
    """
    _check_lengths(batch)
    _check_host_copies(batch)
    _check_bounds(batch)
    if batch.table is not None:
        _check_rows(batch, batch.table)
    if batch.slots is not None:
        _check_slots(batch, batch.slots)
        if not batch.is_cross:
            _check_slots_of_tokens(batch, batch.slots)
    if batch.query_bias is not None:
        _check_bias(batch, batch.query_bias)


def _check_lengths(batch: BatchValues) -> None:
    starts, seq_lens = batch.starts, batch.seq_lens
    if len(starts) != len(seq_lens) + 1:
        raise ContractError(
            f"query_start_loc has {len(starts)} entries for {len(seq_lens)} requests; it must have "
            f"{len(seq_lens) + 1}",
            rule="M1",
        )
    if starts[0] != 0:
        raise ContractError(f"query_start_loc[0]={starts[0]} must be 0", rule="M1")
    for request, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if end < start:
            raise ContractError(
                f"query_start_loc falls from {start} to {end} at request {request}; it must not "
                "decrease",
                rule="M1",
            )
    if batch.num_tokens is not None and starts[-1] > batch.num_tokens:
        raise ContractError(
            f"query_start_loc ends at {starts[-1]}, but num_actual_tokens={batch.num_tokens}",
            rule="M1",
        )
    for request, (queries, length) in enumerate(zip(batch.query_lens, seq_lens, strict=True)):
        if length < 0:
            raise ContractError(f"seq_lens[{request}]={length} must not be negative", rule="M7")
        if length < queries and not batch.is_cross:
            raise ContractError(
                f"seq_lens[{request}]={length} is below the {queries} new tokens of the request: "
                "seq_lens count context and new tokens",
                rule="M1",
            )


def _check_host_copies(batch: BatchValues) -> None:
    for name, device, host in (
        ("query_start_loc", batch.starts, batch.starts_cpu),
        ("seq_lens", batch.seq_lens, batch.seq_lens_cpu),
    ):
        if host is None or host == device or (not batch.exact and not any(host)):
            continue
        if len(host) != len(device):
            raise ContractError(
                f"{name}_cpu has {len(host)} entries, {name} has {len(device)}", rule="M1"
            )
        index = next(
            i for i, pair in enumerate(zip(device, host, strict=True)) if pair[0] != pair[1]
        )
        if name == "seq_lens" and not batch.exact:
            too_small = [i for i, (d, h) in enumerate(zip(device, host, strict=True)) if h < d]
            if not too_small:
                continue
            index = too_small[0]
        raise ContractError(
            f"{name}[{index}]={device[index]} on the device, but {name}_cpu[{index}]="
            f"{host[index]}: both must have the same values",
            rule="M1",
        )
    if batch.computed_cpu is None or batch.starts_cpu is None or batch.seq_lens_cpu is None:
        return
    if batch.is_cross or (not batch.exact and not any(batch.seq_lens_cpu)):
        return
    starts = batch.starts_cpu
    for request, (computed, length) in enumerate(
        zip(batch.computed_cpu, batch.seq_lens_cpu, strict=False)
    ):
        queries = starts[request + 1] - starts[request]
        if computed != length - queries:
            raise ContractError(
                f"num_computed_tokens_cpu[{request}]={computed}, but "
                f"seq_lens_cpu[{request}]={length} with {queries} new tokens leaves "
                f"{length - queries}",
                rule="M1",
            )


def _check_bounds(batch: BatchValues) -> None:
    for name, bound, lengths in (
        ("max_query_len", batch.max_query_len, batch.query_lens),
        ("max_seq_len", batch.max_seq_len, batch.seq_lens),
    ):
        longest = max(lengths, default=0)
        if bound is not None and bound < longest:
            raise ContractError(
                f"{name}={bound} is below the length {longest} of request "
                f"{lengths.index(longest)}: it must be an upper bound",
                rule="M1",
            )


def _check_rows(batch: BatchValues, table: list[list[int]]) -> None:
    if len(table) != len(batch.seq_lens):
        raise ContractError(
            f"block_table has {len(table)} rows for {len(batch.seq_lens)} requests", rule="P3"
        )
    for request, length in enumerate(batch.seq_lens):
        need = -(-length // batch.block_size)
        if need > len(table[request]):
            raise ContractError(
                f"block_table row {request} has {len(table[request])} entries, but "
                f"seq_lens[{request}]={length} needs {need} blocks of {batch.block_size} tokens",
                rule="P3",
            )
        for column, block in enumerate(table[request][:need]):
            if block < 0 or (batch.num_blocks is not None and block >= batch.num_blocks):
                blocks = (
                    "any pool"
                    if batch.num_blocks is None
                    else f"the pool of {batch.num_blocks} blocks (0 to {batch.num_blocks - 1})"
                )
                raise ContractError(
                    f"block_table[{request}][{column}]={block} is outside {blocks}", rule="P3"
                )


def _check_slots(batch: BatchValues, slots: list[int]) -> None:
    """Slots inside the cache, each of one token."""
    seen: dict[int, int] = {}
    count = None if batch.num_blocks is None else batch.num_blocks * batch.block_size
    for token, slot in enumerate(slots):
        if slot < -1 or (count is not None and slot >= count):
            cache = "any cache" if count is None else f"the cache of {count} slots"
            raise ContractError(
                f"slot_mapping[{token}]={slot} is outside {cache} (-1 writes nothing)", rule="P4"
            )
        if slot >= 0 and slot in seen:
            raise ContractError(
                f"slot_mapping[{token}] and slot_mapping[{seen[slot]}] are both {slot}: two tokens "
                "cannot share a slot",
                rule="P4",
            )
        seen[slot] = token


def _check_slots_of_tokens(batch: BatchValues, slots: list[int]) -> None:
    """One slot per new token, where the block table says."""
    end = batch.starts[-1]
    if len(slots) < end:
        raise ContractError(
            f"slot_mapping has {len(slots)} entries for {end} new tokens: the others would not be "
            "written; use -1 for a token that is in the cache already",
            rule="P4",
        )
    for token in range(end, len(slots)):
        if slots[token] >= 0:
            raise ContractError(
                f"slot_mapping[{token}]={slots[token]} writes a padding row past the {end} tokens "
                "of the batch: it must be -1",
                rule="P4",
            )
    if batch.table is None:
        return
    for request, (start, queries) in enumerate(zip(batch.starts, batch.query_lens, strict=False)):
        for token in range(start, start + queries):
            position = batch.seq_lens[request] - queries + token - start
            column, offset = divmod(position, batch.block_size)
            expected = batch.table[request][column] * batch.block_size + offset
            if slots[token] not in (-1, expected):
                raise ContractError(
                    f"slot_mapping[{token}]={slots[token]}, but request {request} reads position "
                    f"{position} from slot {expected} (block_table[{request}][{column}]="
                    f"{batch.table[request][column]})",
                    rule="P4",
                )


def _check_bias(batch: BatchValues, bias: torch.Tensor) -> None:
    """The bias of the query span; columns past it are not read."""
    for request, (start, queries) in enumerate(zip(batch.starts, batch.query_lens, strict=False)):
        span = bias[start : start + queries, :queries]
        wrong = span.isnan() | (span == torch.inf)
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise ContractError(
                f"query_bias[{start + row}][{column}]={span[row, column].item()} of request "
                f"{request} must be finite or -inf",
                rule="M3",
            )
