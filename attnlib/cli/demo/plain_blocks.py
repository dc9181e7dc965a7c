"""Blocks of requests for a model whose layers have caches of their own."""

from __future__ import annotations

from attnlib.cache.allocator import BlockAllocator, TokenIds
from attnlib.cache.sequence_blocks import SequenceBlocks

__all__ = ["PlainBlocks"]


class PlainBlocks:
    """What a scheduler uses of a `HybridBlockAllocator`, where all layers have the same blocks.

    Args:
        num_blocks, block_size: as in `BlockAllocator`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockAllocator(num_blocks, block_size)

    def start(self, token_ids: TokenIds = ()) -> SequenceBlocks:
        """The blocks of a new request, with its longest cached prefix."""
        hit = self.pool.acquire_prefix(token_ids)
        return SequenceBlocks({"": list(hit.block_ids)}, hit.num_tokens)

    def num_missing_blocks(self, sequence: SequenceBlocks, num_tokens: int) -> int:
        """Blocks that `grow` allocates."""
        return max(-(-num_tokens // self.pool.block_size) - len(sequence.blocks[""]), 0)

    def grow(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Allocate blocks for the first `num_tokens` tokens of a request.

        Raises:
            CacheExhaustedError: fewer blocks are free; none is allocated.
        """
        sequence.blocks[""] += self.pool.allocate(self.num_missing_blocks(sequence, num_tokens))

    def advance(self, sequence: SequenceBlocks, token_ids: TokenIds) -> None:
        """Record that the keys and values of all these tokens are in the caches."""
        self.pool.commit(token_ids, sequence.blocks[""])
        sequence.num_computed = len(token_ids)

    def release(self, sequence: SequenceBlocks) -> None:
        """Free all blocks of a request. It is then empty."""
        self.pool.free(sequence.blocks[""])
        sequence.blocks[""], sequence.num_computed = [], 0
