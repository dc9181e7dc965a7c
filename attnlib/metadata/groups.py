"""The batches of a step over a pool that several groups of layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnlib.cache.hybrid_allocator import HybridBlockAllocator, SequenceBlocks
from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["GroupBatch", "group_batches"]

GroupBatch = CommonAttentionMetadata | Sequence[CommonAttentionMetadata]
"""The batch of a group of keys, or those of the layers of a group of states."""


def group_batches(
    allocator: HybridBlockAllocator,
    sequences: Sequence[SequenceBlocks],
    query_lens: Sequence[int],
    device: torch.device | str | None = None,
) -> dict[str, GroupBatch]:
    """The batches of a step, one for each group of keys. Each layer of a group of states has one of
    its own, because a request has another slot in each.

    Args:
        allocator: of the pool.
        sequences: the requests, which `grow` has given blocks for their new tokens.
        query_lens: new tokens of each request, behind its computed ones.
        device: where the kernels run; None means the default device of torch.

    Raises:
        ContractError: a request without slots for its states, or blocks too few for its tokens.
    """
    ends = [one.num_computed + new for one, new in zip(sequences, query_lens, strict=True)]
    batches: dict[str, GroupBatch] = {}
    for name, table in allocator.block_tables(sequences).items():
        size = allocator.groups[name].block_size
        batches[name] = CommonAttentionMetadata.from_lengths(query_lens, ends, table, size, device)
    for name, layers in allocator.state_slots(sequences).items():
        batch = CommonAttentionMetadata.from_lengths(query_lens, ends, device=device)
        slots = torch.tensor([[each.slots, each.sources] for each in layers], dtype=torch.int32)
        moved = slots.to(batch.seq_lens.device, non_blocking=True)
        # All layers of a request read their own slots, or none does.
        reads_others = layers[0].slots != layers[0].sources
        batches[name] = [
            replace(batch, state_slots=own, state_sources=source if reads_others else None)
            for own, source in moved
        ]
    return batches
