"""Choose the keys that a layer attends to, by index keys (M14).

selected = indexer(index_query, weights, index_key, index_cache, metadata)
output = layer(query, key, value, cache, metadata, selected_keys=selected)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnlib.cache.index_keys import IndexKeyCache
from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.compressed import EntryBatch
from attnlib.metadata.facts import FoundFacts
from attnlib.ops.addresses import as_count, check_block_table, check_starts
from attnlib.ops.dispatch import operation
from attnlib.sparse.key_selection import KeySelection, SelectedKeys

__all__ = ["KeyIndexer"]


class KeyIndexer:
    """Writes new index keys, scores all visible ones, and returns the lists of the best.

    On a GPU the Triton operations run, elsewhere those of torch. Scores are held for as many query
    tokens as fit a workspace of 256 MiB (Triton) or 64 MiB (torch), and for at least one.

    Args:
        selection: the form of the lists, that of the layer's spec; `query_block_size` is 1.
        local_blocks: blocks up to and including the query's own that are always selected.

    Raises:
        ContractError: a selection or a number of blocks that an indexer cannot make.
    """

    def __init__(self, selection: KeySelection, *, local_blocks: int = 0) -> None:
        if not isinstance(selection, KeySelection):
            raise ContractError(
                f"selection is a {type(selection).__name__}; it must be a KeySelection", rule="M14"
            )
        if selection.query_block_size != 1:
            raise ContractError(
                f"query_block_size={selection.query_block_size} of the key selection: an indexer "
                "makes one list per query token; set it to 1",
                rule="M14",
            )
        if not 0 <= as_count("local_blocks", local_blocks) <= selection.max_blocks:
            raise ContractError(
                f"local_blocks={local_blocks} must be from 0 to max_blocks={selection.max_blocks}",
                rule="M14",
            )
        self.selection = selection
        self.local_blocks = local_blocks

    def __call__(
        self,
        query: torch.Tensor,
        weights: torch.Tensor | None,
        key: torch.Tensor | None,
        cache: IndexKeyCache,
        metadata: AttentionMetadata | EntryBatch,
    ) -> SelectedKeys:
        """The selected keys of a batch.

        Args:
            query: `[T, Hi, Di]`, index queries, with their softmax scale if they have one.
            weights: `[T, Hi]` float32: the score of a key is the sum over the heads of
                weight * max(q . k, 0), and all heads share a list. None: each index head has its
                own list by the scores q . k.
            key: `[T, Di]`, the index keys of the new tokens; None if the cache has them.
            cache: the index keys of the layer.
            metadata: the batch's metadata, as for the layer; an `EntryBatch` selects compressed
                entries (M17), whose index keys the caller has written.

        Returns:
            The argument `selected_keys` of the layer: lists of `max_blocks` entries in ascending
            order, padded with -1.

        Raises:
            ContractError: tensors of another form; on a CPU and under ATTNLIB_VALIDATE also blocks
                and slots outside of the cache. Nothing is written then.
        """
        batch = _batch_of(metadata, cache)
        self._check(query, weights, key, cache, batch)
        _check_addresses(query, key, cache, batch)
        if key is not None and batch.slot_mapping is not None:
            cache.write(key, batch.slot_mapping)
        heads = query.shape[1] if weights is None else 1
        shape = (query.shape[0], heads, self.selection.max_blocks)
        indices = torch.empty(shape, dtype=torch.int32, device=query.device)
        operation("key_indexer", "select_keys", query)(
            query,
            weights,
            cache.keys,
            cache.scales,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            self.selection,
            local_blocks=self.local_blocks,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            out=indices,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            seq_lens_cpu=batch.seq_lens_cpu,
        )
        return SelectedKeys(indices)

    def _check(
        self,
        query: torch.Tensor,
        weights: torch.Tensor | None,
        key: torch.Tensor | None,
        cache: IndexKeyCache,
        batch: _Batch,
    ) -> None:
        size = cache.keys.shape[2]
        if (
            query.dim() != 3
            or query.shape[2] != size
            or query.stride(2) != 1
            or not query.is_floating_point()
        ):
            raise ContractError(
                f"index queries are {query.dtype} of shape {tuple(query.shape)} and strides "
                f"{query.stride()}; they must be floating point [tokens, heads, {size}] with last "
                "stride 1",
                rule="M14",
            )
        if query.shape[0] < batch.num_actual_tokens:
            raise ContractError(
                f"index queries have {query.shape[0]} rows, but the batch has "
                f"{batch.num_actual_tokens} tokens",
                rule="M14",
            )
        if weights is not None and (
            weights.shape != query.shape[:2]
            or weights.dtype != torch.float32
            or weights.stride(1) != 1
        ):
            raise ContractError(
                f"weights of the index heads are {weights.dtype} {tuple(weights.shape)} with "
                f"strides {weights.stride()}; they must be torch.float32 {list(query.shape[:2])} "
                "with last stride 1",
                rule="M14",
            )
        for name, tensor in (("weights", weights), ("key", key), ("cache", cache.keys)):
            if tensor is not None and tensor.device != query.device:
                raise ContractError(
                    f"{name} of the indexer is on {tensor.device}, its query on {query.device}: "
                    "all tensors of a call must be on one device",
                    rule="M14",
                )


class _Batch(NamedTuple):
    """What an indexer reads of a batch."""

    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc_cpu: torch.Tensor | None
    seq_lens_cpu: torch.Tensor | None
    slot_mapping: torch.Tensor | None


def _batch_of(metadata: object, cache: IndexKeyCache) -> _Batch:
    """The batch that metadata describes, in the blocks of an index cache."""
    facts = FoundFacts.of(metadata)
    fields = {name: getattr(facts, name) for name in _Batch._fields}
    for name in _Batch._fields[:6]:
        if fields[name] is None:
            what = "block table" if name == "block_table" else name
            raise ContractError(
                f"metadata of the indexer, a {type(metadata).__name__}, has no {what}, by which "
                "index keys are found: pass the metadata of the layer's batch",
                rule="M14",
            )
    made_for = facts.spec
    if made_for is not None and made_for.block_size != cache.block_size:
        raise ContractError(
            f"the index cache has blocks of {cache.block_size} tokens, the batch has "
            f"block_size={made_for.block_size}: both use one block table",
            rule="M14",
        )
    return _Batch(**fields)


def _check_addresses(
    query: torch.Tensor, key: torch.Tensor | None, cache: IndexKeyCache, batch: _Batch
) -> None:
    """Whether the requests, their blocks and the slots of new keys exist."""
    for name in ("block_table", "query_start_loc", "seq_lens"):
        tensor = getattr(batch, name)
        if tensor.dtype != torch.int32 or tensor.device != query.device:
            raise ContractError(
                f"{name} of the indexer's metadata is {tensor.dtype} on {tensor.device}; it must "
                f"be torch.int32 on {query.device}",
                rule="M14",
            )
    starts, requests = batch.query_start_loc, batch.seq_lens.shape[0]
    if starts.shape != (requests + 1,):
        raise ContractError(
            f"query_start_loc has shape {tuple(starts.shape)}, but seq_lens has {requests} "
            f"requests; it must be [{requests + 1}]",
            rule="M1",
        )
    check_starts("query_start_loc", starts, query.shape[0])
    blocks, size = cache.keys.shape[:2]
    check_block_table(batch.block_table, batch.seq_lens, size, blocks)
    if key is not None and batch.slot_mapping is not None:
        cache.check_new(key, batch.slot_mapping)
