"""Compute the KV slot of each query token from the block table. One program per block of tokens."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["slot_mapping_kernel"]


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "max_blocks", "stride_table"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def slot_mapping_kernel(
    query_start_loc, seq_lens, block_table, slots, num_reqs, num_tokens, max_blocks, stride_table,
    BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the slots of BLOCK_T tokens; -1 for tokens without a slot. Grid: (blocks of tokens)."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    # A token's request is the number of requests that end at or before it, because their ends never
    # decrease. One pass over the requests replaces a binary search per token.
    request = tl.zeros([BLOCK_T], tl.int32)
    for base in range(0, num_reqs, BLOCK_R):
        lanes = base + tl.arange(0, BLOCK_R)
        ends = tl.load(query_start_loc + 1 + lanes, mask=lanes < num_reqs, other=2147483647)
        request += tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), 1)
    live = (request < num_reqs) & (tokens < num_tokens)
    end = tl.load(query_start_loc + 1 + request, mask=live, other=0)
    seq_len = tl.load(seq_lens + request, mask=live, other=0)
    position = seq_len - end + tokens
    # Padding before the first position, or a table that is too short, gives no slot.
    block_index = tl.maximum(position, 0) // BLOCK_SIZE
    live = live & (position >= 0) & (block_index < max_blocks)
    block = tl.load(
        block_table + request.to(tl.int64) * stride_table + block_index, mask=live, other=0
    ).to(tl.int64)
    slot = block * BLOCK_SIZE + tl.maximum(position, 0) % BLOCK_SIZE
    tl.store(slots + tokens, tl.where(live, slot, -1), mask=tokens < num_tokens)
