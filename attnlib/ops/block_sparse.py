"""Block-sparse decode: each head sees local key blocks and a pattern of vertical stripes.

The keys of a request are divided into sparse blocks of `block_size` positions; the query is in
block q = (seq_len - 1) // block_size. A head sees key block k if

    k > q - local_blocks               (the block is local), or
    (k + offset) % vert_stride == 0    (the block is on a stripe of that head).

The offset of a head is 1 + step * h. If `head_sliding_step` >= 0, step is that number and h counts
query heads over all ranks (tp_rank * Hq + head); otherwise step is its absolute value and h counts
KV heads (tp_rank * Hkv + KV head). This is the pattern of the block-sparse variant of vLLM's paged
attention kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlib.errors import AssertedContractError

__all__ = ["BlockSparsePattern"]


@dataclass(frozen=True)
class BlockSparsePattern:
    """The parameters of the pattern; see the module's description.

    Attributes:
        local_blocks: sparse blocks before and including the query's own that every head sees.
        vert_stride: distance between stripes, in sparse blocks.
        block_size: positions per sparse block.
        head_sliding_step: shift of the stripes from one head to the next.
        num_heads: Hq of this rank.
        num_kv_heads: Hkv of this rank.
        tp_rank: tensor-parallel rank.
    """

    local_blocks: int
    vert_stride: int
    block_size: int
    head_sliding_step: int
    num_heads: int
    num_kv_heads: int
    tp_rank: int

    def check(self, cache_block_size: int) -> None:
        """Raise AssertedContractError unless a sparse block is a whole number of cache blocks."""
        if self.block_size <= 0 or self.block_size % cache_block_size:
            raise AssertedContractError(
                f"blocksparse_block_size {self.block_size} is not a positive multiple of "
                f"the cache's block size {cache_block_size}: choose a multiple of it"
            )

    def visible(self, seq_len: int, device: torch.device) -> Tensor:
        """`[Hq, 1, seq_len]` bool, for a query at the last position."""
        blocks = torch.arange(seq_len, device=device) // self.block_size
        heads = torch.arange(self.num_heads, device=device)
        if self.head_sliding_step >= 0:
            counted = self.tp_rank * self.num_heads + heads
        else:
            counted = self.tp_rank * self.num_kv_heads + heads // (
                self.num_heads // self.num_kv_heads
            )
        offsets = counted * abs(self.head_sliding_step) + 1
        striped = (blocks + offsets[:, None]) % self.vert_stride == 0
        local = blocks > (seq_len - 1) // self.block_size - self.local_blocks
        return (striped | local).unsqueeze(1)
