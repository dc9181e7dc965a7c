"""Block-sparse decode: which keys a head sees when only local blocks and a vertical stripe pattern are kept.

The keys of a request are cut into sparse blocks of `block_size` positions, and the query sits in block
q = (seq_len - 1) // block_size. Key block k is visible to a head iff it is local, k > q - local_blocks, or on a stripe
of that head, (k + o) % vert_stride == 0, where o = 1 + step * h. For a head sliding step >= 0, `step` is it and h
counts query heads over all ranks (tp_rank * Hq + head); below 0, `step` is its absolute value and h counts KV heads
(tp_rank * Hkv + KV head). Source: the block-sparse variant of vLLM's paged attention kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.general import general_attention
from attnlib.ops.torch.request import QueryRows, rows_bias, score_dtype

__all__ = ["BlockSparsePattern", "block_sparse_decode"]


@dataclass(frozen=True)
class BlockSparsePattern:
    """The parameters of the pattern, in the names of the module's text."""

    local_blocks: int
    vert_stride: int
    block_size: int
    head_sliding_step: int
    num_heads: int
    num_kv_heads: int
    tp_rank: int

    def check(self, cache_block_size: int) -> None:
        """Raise ContractError for a sparse block that is not a whole number of cache blocks."""
        if self.block_size <= 0 or self.block_size % cache_block_size:
            raise ContractError(
                f"blocksparse_block_size {self.block_size} is not a positive multiple of the cache's block size "
                f"{cache_block_size}: choose a multiple of {cache_block_size}"
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


def block_sparse_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    pattern: BlockSparsePattern,
    k_factor: float | Tensor = 1.0,
    v_factor: float | Tensor = 1.0,
) -> Tensor:
    """One request: `query [1, Hq, D]` at the last of `key [S, Hkv, D]`, `value [S, Hkv, Dv]`; `[1, Hq, Dv]` float32."""
    seq_len = key.shape[0]
    rows = QueryRows(query, seq_len - 1, seq_len, seq_len - 1, True)
    bias = rows_bias(rows, 0, seq_len, params)
    hidden = ~pattern.visible(seq_len, query.device)
    if bias is None:
        bias = torch.zeros(hidden.shape, dtype=score_dtype(query), device=query.device)
    return general_attention(
        query, key, value, bias.masked_fill(hidden, -torch.inf), params, k_factor, v_factor
    )[0]
