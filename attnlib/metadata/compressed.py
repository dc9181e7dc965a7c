"""Compressed entries of a batch and of a call (M17), for layers with `spec.compressed_entries`.

Entries become visible as their tokens are complete, so that the queries of a request see different
numbers of them. `EntryBatch` therefore describes the entries as a batch with one query per request:
every query token of the layer's batch is one. All layers with one compression rate share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.host_lengths import check_type
from attnlib.ops.addresses import as_count, check_block_table
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec

__all__ = ["CompressedKeys", "EntryBatch"]


@dataclass(frozen=True, eq=False)
class EntryBatch:
    """The visible entries of each query token of a batch.

    `KeyIndexer` takes it as the metadata of a call that selects entries by their index keys (M14).

    Attributes:
        compress_rate: tokens of one entry.
        query_start_loc: `[T + 1]` int32, 0 to T.
        num_entries: `[T]` int32, entries that the query may see: `(p + 1) // compress_rate` at
            position p, 0 for rows of padding.
        block_table: `[T, m]` int32, the blocks of the entries of the query's request.
        max_entries: an upper bound of `num_entries`, known to the host.
    """

    compress_rate: int
    query_start_loc: Tensor
    num_entries: Tensor
    block_table: Tensor
    max_entries: int

    slot_mapping: ClassVar[None] = None
    query_start_loc_cpu: ClassVar[None] = None
    seq_lens_cpu: ClassVar[None] = None
    max_query_len: ClassVar[int] = 1

    @property
    def seq_lens(self) -> Tensor:
        """`num_entries`, under the name that metadata of backends have."""
        return self.num_entries

    @property
    def max_seq_len(self) -> int:
        """`max_entries`, likewise."""
        return self.max_entries

    @property
    def num_actual_tokens(self) -> int:
        """T."""
        return self.num_entries.shape[0]

    @classmethod
    def build(
        cls, common: CommonAttentionMetadata, block_table: Tensor, compress_rate: int
    ) -> EntryBatch:
        """The entries of a batch; no host sync, so that a CUDA graph can capture it.

        Args:
            common: the batch of the layer's own keys.
            block_table: `[R, m]` int32 device, the blocks of each request's entries: block
                `e // block_size` of its row holds entry e.
            compress_rate: tokens of one entry.

        Raises:
            ContractError: a block table of another shape, dtype or device, or a rate below 1.
        """
        compress_rate = as_count("compress_rate", compress_rate, 1)
        check_type(common)
        if not isinstance(block_table, Tensor):
            raise ContractError(
                f"block_table of the entries is a {type(block_table).__name__}; it must be an "
                "int32 tensor [R, blocks]",
                rule="M17",
            )
        device, requests = common.seq_lens.device, common.num_reqs
        if (
            block_table.dtype != torch.int32
            or block_table.dim() != 2
            or block_table.shape[0] != requests
            or block_table.device != device
        ):
            raise ContractError(
                f"block_table of the entries is {block_table.dtype} {tuple(block_table.shape)} on "
                f"{block_table.device}; it must be torch.int32 [{requests}, blocks] on {device}",
                rule="M17",
            )
        count = common.num_actual_tokens
        tokens = torch.arange(count + 1, dtype=torch.int32, device=device)
        if requests == 0:
            empty = tokens[:count]
            return cls(compress_rate, tokens, empty, block_table.new_zeros(count, 1), 0)
        rows, starts = tokens[:count], common.query_start_loc
        # The last request that begins at or before the token; empty requests begin where the next
        # one does.
        request = (torch.searchsorted(starts, rows, right=True) - 1).clamp_(0, requests - 1)
        position = common.seq_lens[request] - starts[request + 1] + rows
        complete = torch.div(position + 1, compress_rate, rounding_mode="floor")
        complete = complete.masked_fill(rows >= starts[-1], 0).to(torch.int32)
        return cls(
            compress_rate,
            tokens,
            complete,
            block_table[request],
            common.max_seq_len // compress_rate,
        )


@dataclass(frozen=True, eq=False)
class CompressedKeys:
    """The compressed entries of one layer call (M17).

    Attributes:
        cache: the entries of the layer, in the form of its own cache. Its blocks hold
            `spec.compressed_entries.block_size` entries.
        batch: the entries of the step.
        selected: the lists of selected entries, one per query token, exactly when
            `spec.compressed_entries` has a selection. Entries that a query may not see select
            nothing.
    """

    cache: PagedKVCache
    batch: EntryBatch
    selected: SelectedKeys | None = None

    def __post_init__(self) -> None:
        types = (PagedKVCache, EntryBatch, SelectedKeys | None)
        given = {"cache": self.cache, "batch": self.batch, "selected": self.selected}
        for (name, x), wanted in zip(given.items(), types, strict=True):
            if not isinstance(x, wanted):
                raise ContractError(
                    f"{name} of the compressed keys is a {type(x).__name__}; pass a PagedKVCache, "
                    "an EntryBatch and, with lists, SelectedKeys",
                    rule="M17",
                )

    @property
    def signature(self) -> tuple[Any, ...]:
        """What the checks of a call follow from, besides values."""
        batch = self.batch
        tensors = (batch.num_entries, batch.block_table)
        return (
            self.cache.signature,
            batch.compress_rate,
            *((x.dtype, x.shape, x.device) for x in tensors),
            None if self.selected is None else self.selected.signature,
        )

    def check(self, spec: AttentionSpec, query: Tensor, num_tokens: int) -> None:
        """Check sizes, dtypes and devices against the layer; values are not read.

        Args:
            spec: of the layer.
            query: `[T, Hq, D]` of the call.
            num_tokens: query tokens of the batch.

        Raises:
            ContractError: the message names the tensor, what it is and what it must be.
        """
        entries = spec.compressed_entries
        assert entries is not None  # the caller compares the spec
        self._check_cache(spec, entries.block_size, query.device)
        batch = self.batch
        if batch.compress_rate != entries.compress_rate:
            raise ContractError(
                f"the batch of the entries has compress_rate={batch.compress_rate}, the spec "
                f"{entries.compress_rate}: build one EntryBatch for each rate",
                rule="M17",
            )
        if batch.num_entries.shape[0] != num_tokens or batch.num_entries.device != query.device:
            raise ContractError(
                f"the batch of the entries has {batch.num_entries.shape[0]} tokens on "
                f"{batch.num_entries.device}, the layer's batch {num_tokens} on {query.device}: "
                "build it from the batch of this step",
                rule="M17",
            )
        if batch.block_table.dim() != 2 or batch.block_table.shape[0] != num_tokens:
            raise ContractError(
                f"block_table of the entries has shape {tuple(batch.block_table.shape)}; it must "
                f"be [{num_tokens}, blocks], one row for each token",
                rule="M17",
            )
        if (self.selected is None) != (entries.selection is None):
            given = "missing" if self.selected is None else "given"
            raise ContractError(
                f"the lists of selected entries are {given}, but the spec has "
                f"compressed_entries={entries}: a call passes lists exactly when the spec declares "
                "their form",
                rule="M17",
            )
        if self.selected is not None and entries.selection is not None:
            self.selected.check(
                entries.selection,
                spec.num_heads,
                spec.num_kv_heads,
                num_tokens,
                num_tokens,
                query.device,
            )

    def check_blocks(self, block_size: int) -> None:
        """Check that the blocks of visible entries exist: on a CPU, and elsewhere under
        ATTNLIB_VALIDATE.

        Args:
            block_size: entries per block.

        Raises:
            ContractError: names the row and the block.
        """
        table, count = self.batch.block_table, self.batch.num_entries
        check_block_table(table, count, block_size, self.cache.num_blocks, what="num_entries")

    def _check_cache(self, spec: AttentionSpec, block_size: int, device: torch.device) -> None:
        cache = self.cache
        found = (
            cache.block_size,
            *cache.key_cache.shape[2:],
            cache.value_cache.shape[3],
            cache.dtype,
        )
        wanted = (block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.kv_dtype)
        if found != wanted or cache.device != device:
            raise ContractError(
                f"the cache of the entries has (block size, heads, key size, value size, dtype) "
                f"{found} on {cache.device}; it must have {wanted} on {device}",
                rule="M17",
            )
        if spec.use_mla and not cache.values_alias_keys:
            raise ContractError(
                "the cache of the entries has values in memory of their own, and the spec has "
                "use_mla: wrap it with PagedKVCache.from_views(entries, "
                f"entries[..., :{spec.head_size_v}])",
                rule="P10",
            )
