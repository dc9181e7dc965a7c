"""The batches of a step over a pool that several groups of layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.cache.hybrid_allocator import HybridBlockAllocator, SequenceBlocks
from attnlib.cache.sequence_blocks import as_sequence
from attnlib.errors import ContractError
from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.lengths import TableLike, table_and_slots
from attnlib.metadata.states import StateMetadata
from attnlib.ops.addresses import as_count, as_ids

__all__ = ["GroupBatch", "StateGroupBatch", "group_batches"]


@dataclass(frozen=True, eq=False)
class StateGroupBatch:
    """The batch of a group of states: a request has another slot in each layer.

    Attributes:
        batch: with the slots of the first layer.
        slots: of each layer, `[R]` int32 device.
        sources: of each layer, or None where all requests read their own slots.
    """

    batch: CommonAttentionMetadata
    slots: tuple[torch.Tensor, ...]
    sources: tuple[torch.Tensor, ...] | None

    def build(self, builder: AttentionMetadataBuilder[Any]) -> list[StateMetadata]:
        """The metadata of each layer; they share plans."""
        first: StateMetadata = builder.build(0, self.batch)
        sources = self.sources or (None,) * len(self.slots)
        pairs = zip(self.slots[1:], sources[1:], strict=True)
        return [first, *(first.with_slots(*pair) for pair in pairs)]


GroupBatch = CommonAttentionMetadata | StateGroupBatch


def group_batches(
    allocator: HybridBlockAllocator,
    sequences: Sequence[SequenceBlocks],
    query_lens: Sequence[int],
    device: torch.device | str | None = None,
) -> dict[str, GroupBatch]:
    """The batches of a step, one for each group of a pool.

    Args:
        allocator: of the pool.
        sequences: the requests, which `grow` has given blocks for their new tokens.
        query_lens: new tokens of each request, behind its computed ones.
        device: where the kernels run; None means the default device of torch.

    Raises:
        ContractError: not a length for each request, a request twice, one without slots for its
            states, or blocks too few for its tokens.
    """
    sequences, query_lens = _checked(allocator, sequences, query_lens)
    ends = [one.num_computed + new for one, new in zip(sequences, query_lens, strict=True)]
    batch = CommonAttentionMetadata.from_lengths(query_lens, ends, device=device)
    batches: dict[str, GroupBatch] = {}
    for name, table in allocator.block_tables(sequences).items():
        batches[name] = _with_table(batch, table, allocator.groups[name].layer_spec.block_size)
    for name, layers in allocator.state_slots(sequences).items():
        # Rows of each layer at multiples of 16 bytes, as launches without checks need them.
        padding = [-1] * (-len(sequences) % 4)
        rows = [[[*each.slots, *padding], [*each.sources, *padding]] for each in layers]
        on_device = torch.tensor(rows, dtype=torch.int32, device="cpu").to(
            batch.seq_lens.device, non_blocking=True
        )
        slots, sources = on_device[:, :, : len(sequences)].unbind(1)
        own = all(each.slots == each.sources for each in layers)
        batches[name] = StateGroupBatch(
            replace(batch, state_slots=slots[0], state_sources=None if own else sources[0]),
            slots.unbind(0),
            None if own else sources.unbind(0),
        )
    return batches


def _with_table(
    batch: CommonAttentionMetadata, table: TableLike, block_size: int
) -> CommonAttentionMetadata:
    """A batch without blocks, over those of a table."""
    starts, sequences = batch.query_start_loc_cpu, batch.seq_lens_cpu
    assert starts is not None and sequences is not None  # of `from_lengths`
    device = batch.seq_lens.device
    blocks, slots = table_and_slots(
        table, starts, batch.query_lens_cpu, sequences, block_size, device, write=True
    )
    return replace(batch, block_table_tensor=blocks, slot_mapping=slots, block_size=block_size)


def _checked(
    allocator: object, sequences: Sequence[SequenceBlocks], query_lens: Sequence[int]
) -> tuple[list[SequenceBlocks], list[int]]:
    """The requests of a step and their new tokens; see `group_batches`."""
    if not isinstance(allocator, HybridBlockAllocator):
        raise ContractError(
            f"allocator is a {type(allocator).__name__}; pass the HybridBlockAllocator of the pool"
        )
    requests = [as_sequence(one) for one in as_ids("sequences", sequences, ordered=True)]
    lengths = [
        as_count("query_lens", new) for new in as_ids("query_lens", query_lens, ordered=True)
    ]
    different = len({id(one) for one in requests})
    if not different == len(requests) == len(lengths):
        raise ContractError(
            f"the batch has {len(requests)} requests, {different} of them different, and "
            f"{len(lengths)} query_lens: name each request once, with its new tokens",
            rule="T7",
        )
    return requests, lengths
