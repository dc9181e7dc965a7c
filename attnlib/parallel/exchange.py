"""The exchange of queries and of partial results between the ranks of a group (X5, X6).

Every rank attends with the query heads of all ranks and keeps the result of its own heads. Query
heads are ordered by KV head first: heads of one KV head, from all ranks, are adjacent.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from attnlib.ops.addresses import as_count
from attnlib.ops.dispatch import operation
from attnlib.ops.peer_buffers import PeerBuffers
from attnlib.ops.split_states import SplitStates
from attnlib.ops.torch.softmax import add_sink, merge_weights
from attnlib.parallel.group import RankGroup
from attnlib.parallel.merge import MergeRows, Parts
from attnlib.spec import AttentionSpec

__all__ = ["Exchange", "ExchangeMethod", "choose_exchange", "exchange_bytes"]


class ExchangeMethod(Enum):
    """How partial results become the results of a rank's own heads."""

    ALL_TO_ALL = "all_to_all"
    """Each rank receives the partial results and LSEs of its heads and merges them."""
    REDUCE_SCATTER = "reduce_scatter"
    """LSEs are gathered, each rank weighs its partial results, and the sum is scattered."""
    PEER_MEMORY = "peer_memory"
    """As all_to_all, by writes into the memory of the other GPUs of the host."""


def exchange_bytes(spec: AttentionSpec, world_size: int, num_tokens: int) -> dict[str, int]:
    """Bytes that a rank receives per layer and step (X6): `queries`, and `all_to_all` or
    `reduce_scatter` for the results.

    Args:
        spec: of the layer, with the query heads of one rank.
        world_size: ranks of the group.
        num_tokens: T, new tokens of the step.

    Raises:
        ContractError: no spec, no rank, or a number that is not an integer of at least 0.
    """
    AttentionSpec.check_kind(spec, "exchange_bytes")
    world_size = as_count("world_size", world_size, 1)
    num_tokens = as_count("num_tokens", num_tokens)
    heads, size = (world_size - 1) * num_tokens * spec.num_heads, spec.dtype.itemsize
    results = heads * spec.head_size_v * size
    return {
        "queries": heads * spec.head_size * size,
        ExchangeMethod.ALL_TO_ALL.value: results + heads * 4,
        ExchangeMethod.REDUCE_SCATTER.value: results + heads * world_size * 4,
        ExchangeMethod.PEER_MEMORY.value: results + heads * 4,
    }


def choose_exchange(spec: AttentionSpec, world_size: int) -> ExchangeMethod:
    """The method that receives fewer bytes; among equals, the first of `ExchangeMethod`."""
    received = exchange_bytes(spec, world_size, 1)
    return min(ExchangeMethod, key=lambda method: received[method.value])


class Exchange:
    """The exchange of one layer.

    Args:
        group: the ranks.
        spec: of the layer, with the query heads of one rank.
        method: of the results.
        peers: the buffers of PEER_MEMORY. What does not fit is exchanged by ALL_TO_ALL.
    """

    def __init__(
        self,
        group: RankGroup,
        spec: AttentionSpec,
        method: ExchangeMethod,
        peers: PeerBuffers | None = None,
    ) -> None:
        self.group, self.method, self._peers = group, method, peers
        self._kv_heads, self._per_kv = spec.num_kv_heads, spec.group_size
        self._heads = spec.num_heads
        item = spec.dtype.itemsize
        self._sizes = (spec.head_size * item, spec.head_size_v * item)

    def check(self) -> None:
        """See `PeerBuffers.check`."""
        if self._peers is not None:
            self._peers.check()

    def gather_heads(self, query: Tensor) -> Tensor:
        """`[T, world_size * Hq, D]`, the queries of all ranks.

        Args:
            query: `[T, Hq, D]` of this rank.
        """
        if self.fits(query.shape[0]):
            share = operation("peer_words", "share_words", query)
            rows = query.reshape(query.shape[0] * self._kv_heads, -1).contiguous()
            shared: Tensor = share(rows, self._peers)
            return shared.view(query.shape[0], -1, query.shape[2])
        return self._gathered(query)

    def _gathered(self, query: Tensor) -> Tensor:
        if self.group.world_size == 1:
            return query
        sizes = (self._kv_heads, self._per_kv, query.shape[2])
        parts = self.group.all_gather(query).view(self.group.world_size, -1, *sizes)
        return parts.permute(1, 2, 0, 3, 4).flatten(1, 3)

    def own_heads(self, per_head: Tensor) -> Tensor:
        """`[Hq * world_size]` values of the heads of all ranks in the order of `gather_heads`, from
        `[Hq]` of each rank."""
        return self._gathered(per_head.view(1, -1, 1)).flatten()

    def combine(
        self,
        partial: Tensor,
        partial_lse: Tensor,
        rows: MergeRows,
        output: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        *,
        has_state: bool = True,
        splits: SplitStates | None = None,
    ) -> None:
        """Merge the partial results of all ranks, and the sinks, into the state of this rank's
        heads.

        Args:
            partial: `[T, world_size * Hq, Dv]` over the keys of this rank.
            partial_lse: `[T, world_size * Hq]` float32; -inf where a row sees none of them.
            rows: of the batch.
            output: `[T, Hq, Dv]`, a state over other keys; overwritten.
            lse: `[T, Hq]` float32 of that state; -inf for none. Overwritten.
            sinks: `[Hq]`, counted here once (M4), or None.
            has_state: whether `output` and `lse` hold a state; otherwise they may hold anything.
            splits: those of `partial`, where they are not combined; by memory only.
        """
        if self.fits(output.shape[0]) and not has_state:
            merge = operation("peer_words", "merge_words", output)
            given = (partial, partial_lse, output, lse, self._peers)
            merge(*given, num_kv_heads=self._kv_heads, sinks=sinks, splits=splits)
            return
        if not has_state:
            lse.fill_(-torch.inf)
        outs, lses = self._by_rank(partial), self._by_rank(partial_lse.unsqueeze(-1))
        if self.method is ExchangeMethod.REDUCE_SCATTER:
            found = outs.flatten(2, 3), lses.flatten(2, 4)
            self._reduce(*found, output, lse, sinks)
            return
        shape = torch.Size((self.group.world_size, *output.shape))
        sent = Parts.like(shape, partial)
        sent.outs.view(outs.shape).copy_(outs)
        sent.lses.view(lses.shape).copy_(lses)
        received = Parts.like(shape, partial, has_sink=sinks is not None)
        self.group.all_to_all(received.of_ranks(shape[0] * shape[1]), sent.rows)
        if sinks is not None:
            received.set_sink(sinks)
        rows.merge(received, output, lse)

    def add_sinks(self, output: Tensor, lse: Tensor, sinks: Tensor) -> None:
        """Count the sinks of a state that needs no exchange, in place; arguments as in
        `combine`."""
        moved, merged = add_sink(output.transpose(0, 1).float(), lse.transpose(0, 1), sinks)
        output.copy_(moved.transpose(0, 1))
        lse.copy_(merged.transpose(0, 1))

    def _by_rank(self, partial: Tensor) -> Tensor:
        """`[world_size, T, Hkv, heads of each, n]` of the heads of all ranks, a view."""
        sizes = (self._kv_heads, self.group.world_size, self._per_kv, partial.shape[2])
        return partial.reshape(partial.shape[0], *sizes).permute(2, 0, 1, 3, 4)

    def fits(self, tokens: int) -> bool:
        """Whether an exchange of a batch goes through the buffers; equal on all ranks."""
        peers = self._peers
        return peers is not None and peers.fit(tokens, self._kv_heads, self._heads, self._sizes)

    def by_memory(self, most: int) -> list[int]:
        """Tokens of the smallest and the largest batch that are exchanged by memory, whose
        kernels differ; none if no batch is.

        Args:
            most: tokens of the largest batch.
        """
        largest = next((tokens for tokens in range(most, 0, -1) if self.fits(tokens)), 0)
        return sorted({1, largest}) if largest else []

    def _reduce(
        self, outs: Tensor, lses: Tensor, output: Tensor, lse: Tensor, sinks: Tensor | None
    ) -> None:
        group = self.group
        found = group.all_gather(lses)  # [ranks of keys, ranks of heads, T, Hq]
        found = found.masked_fill(found == torch.inf, -torch.inf)
        weights, totals = merge_weights(found)
        weight = weights[group.rank].unsqueeze(-1)
        weighted = torch.where(weight == 0, 0.0, outs.to(weight.dtype) * weight)
        cached = group.reduce_scatter(weighted.to(outs.dtype).contiguous())
        both, merged = merge_weights(torch.stack((lse, totals[group.rank])))
        total = torch.where(both[0].unsqueeze(-1) == 0, 0.0, output * both[0].unsqueeze(-1))
        total = total + cached * both[1].unsqueeze(-1)
        if sinks is not None:
            moved, merged = add_sink(total.transpose(0, 1), merged.transpose(0, 1), sinks)
            total, merged = moved.transpose(0, 1), merged.transpose(0, 1)
        output.copy_(total)
        lse.copy_(merged)
