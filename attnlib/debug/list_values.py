"""Checks of the values of selected keys (M11) and of compressed entries (M17)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.compressed import CompressedKeys
from attnlib.sparse.key_selection import SelectedKeys

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["check_entries", "check_lists"]


def check_lists(
    layer: Attention, selected: SelectedKeys, metadata: AttentionMetadata, name: str
) -> None:
    """Lists of distinct entries, one for each block of queries (M11)."""
    selection = layer.spec.key_selection
    assert selection is not None  # checked with the call
    query_start_loc = metadata.facts.query_start_loc
    assert query_start_loc is not None  # checked with the call
    starts = query_start_loc.tolist()
    query_lens = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    count = starts[-1] if starts else 0
    if selected.list_start_loc is not None:
        lists = selected.list_start_loc.tolist()
        for request, query_len in enumerate(query_lens):
            need = -(-query_len // selection.query_block_size)
            if lists[request] < 0 or lists[request + 1] - lists[request] < need:
                raise ContractError(
                    f"list_start_loc gives request {request} the lists [{lists[request]}, "
                    f"{lists[request + 1]}), but its {query_len} queries need {need} lists, one "
                    f"for {selection.query_block_size} queries",
                    rule="M11",
                )
        count = lists[-1]
        if count > selected.indices.shape[0]:
            raise ContractError(
                f"list_start_loc ends at {count}, but indices have {selected.indices.shape[0]} "
                "lists",
                rule="M11",
            )
    _check_distinct(selected.indices[:count], name, "M11")


def check_entries(compressed: CompressedKeys, name: str) -> None:
    """Blocks of the visible entries inside their cache, and lists of distinct entries (M17)."""
    batch, cache = compressed.batch, compressed.cache
    first = torch.arange(batch.block_table.shape[1], device=batch.block_table.device)
    read = first * cache.block_size < batch.num_entries[:, None]
    wrong = read & ((batch.block_table < 0) | (batch.block_table >= cache.num_blocks))
    if bool(wrong.any()):
        token, column = wrong.nonzero()[0].tolist()
        raise ContractError(
            f"block_table of the entries of layer {name} has block "
            f"{int(batch.block_table[token, column])} in column {column} for token {token}, "
            f"outside the pool of {cache.num_blocks} blocks",
            rule="M17",
        )
    most = int(batch.num_entries.max()) if len(batch.num_entries) else 0
    if most > batch.block_table.shape[1] * cache.block_size or most > batch.max_entries:
        raise ContractError(
            f"a query of layer {name} sees {most} entries, but max_entries={batch.max_entries} and "
            f"the block table of the entries has {batch.block_table.shape[1]} columns of "
            f"{cache.block_size} entries",
            rule="M17",
        )
    if compressed.selected is not None:
        _check_distinct(compressed.selected.indices[: len(batch.num_entries)], name, "M17")


def _check_distinct(indices: torch.Tensor, name: str, rule: str) -> None:
    ordered = indices.sort(dim=-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(repeated.any()):
        row, head, column = repeated.nonzero()[0].tolist()
        raise ContractError(
            f"list {row} of head {head} of the selected keys of layer {name} holds the entry "
            f"{int(ordered[row, head, column])} twice: the entries of a list must be distinct",
            rule=rule,
        )
