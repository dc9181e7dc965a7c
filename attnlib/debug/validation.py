"""Checks of metadata values, which are read from the device. ATTNLIB_VALIDATE=1 enables them.

`attnlib.call_checks` checks shapes, dtypes and devices, which need no host sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["check_values"]


def check_values(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache | None,
    metadata: Any,
) -> None:
    """Check lengths, block ids and slots of a batch. This synchronizes with the device.

    Args:
        layer: the layer of the call.
        query, key, value: the tensors of the call; `query` has one row per token.
        cache: the cache of the layer; None where keys are not cached.
        metadata: the metadata of the batch. Metadata without `query_start_loc` and `seq_lens` is
            not checked.

    Raises:
        ContractError: the message names the tensor, the request or token, the value and the limit.
    """
    starts = getattr(metadata, "query_start_loc", None)
    seq_lens = getattr(metadata, "seq_lens", None)
    if starts is None or seq_lens is None:
        return  # a plug-in may store lengths in another form
    starts_host, lens_host = starts.tolist(), seq_lens.tolist()
    _check_starts(starts_host, lens_host, query.shape[0])
    if cache is None:
        return
    table = getattr(metadata, "block_table", None)
    if table is not None:
        _check_table(table.tolist(), lens_host, cache)
    slots = getattr(metadata, "slot_mapping", None)
    if slots is not None:
        _check_slots(slots.tolist(), cache)


def _check_starts(starts: list[int], seq_lens: list[int], num_rows: int) -> None:
    if len(starts) != len(seq_lens) + 1:
        raise ContractError(
            f"query_start_loc has {len(starts)} entries for {len(seq_lens)} requests; it must have "
            f"{len(seq_lens) + 1}",
            rule="M1",
        )
    if starts and starts[0] != 0:
        raise ContractError(f"query_start_loc[0]={starts[0]} must be 0", rule="M1")
    for request, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if end < start:
            raise ContractError(
                f"query_start_loc falls from {start} to {end} at request {request}; it must not "
                "decrease",
                rule="M1",
            )
    if starts and starts[-1] > num_rows:
        raise ContractError(
            f"query_start_loc ends at {starts[-1]}, but query has {num_rows} rows", rule="M1"
        )
    for request, length in enumerate(seq_lens):
        if length < 0:
            raise ContractError(f"seq_lens[{request}]={length} must not be negative", rule="M7")


def _check_table(table: list[list[int]], seq_lens: list[int], cache: PagedKVCache) -> None:
    for request, length in enumerate(seq_lens):
        need = -(-length // cache.block_size)
        if need > len(table[request]):
            raise ContractError(
                f"block_table row {request} has {len(table[request])} entries, but "
                f"seq_lens[{request}]={length} needs {need} blocks of {cache.block_size} tokens",
                rule="P3",
            )
        for column, block in enumerate(table[request][:need]):
            if not 0 <= block < cache.num_blocks:
                raise ContractError(
                    f"block_table[{request}][{column}]={block} is outside the pool of "
                    f"{cache.num_blocks} blocks (0 to {cache.num_blocks - 1})",
                    rule="P3",
                )


def _check_slots(slots: list[int], cache: PagedKVCache) -> None:
    seen: dict[int, int] = {}
    for token, slot in enumerate(slots):
        if not -1 <= slot < cache.num_slots:
            raise ContractError(
                f"slot_mapping[{token}]={slot} is outside the cache of {cache.num_slots} slots "
                "(-1 writes nothing)",
                rule="P4",
            )
        if slot >= 0 and slot in seen:
            raise ContractError(
                f"slot_mapping[{token}] and slot_mapping[{seen[slot]}] are both {slot}: two tokens "
                "cannot share a slot",
                rule="P4",
            )
        seen[slot] = token
