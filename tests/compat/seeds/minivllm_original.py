"""MinivLLM's attention layer in plain torch, written from the first seed document."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

__all__ = [
    "Attention",
    "flash_attention_prefill",
    "get_context",
    "paged_attention_decode",
    "prefill_grid",
    "set_context",
    "store_kvcache",
    "tile_sizes",
]

_context = SimpleNamespace(is_prefill=False, slot_mapping=None)


def set_context(is_prefill: bool, **tensors: Tensor) -> None:
    """What the layers of a step read: `cu_seqlens_q`, `slot_mapping`, `context_lens`, ..."""
    global _context
    _context = SimpleNamespace(**{"is_prefill": is_prefill, "slot_mapping": None, **tensors})


def get_context() -> SimpleNamespace:
    return _context


class Attention(nn.Module):
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scale: float = 1.0,
        num_kv_heads: int | None = None,
        block_size: int = 16,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale = scale * (1 / head_dim**0.5)
        self.block_size = block_size
        self.k_cache = torch.tensor([])
        self.v_cache = torch.tensor([])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = get_context()
        q = q.view(-1, self.num_heads, self.head_dim)
        k, v = (x.view(-1, self.num_kv_heads, self.head_dim) for x in (k, v))
        caches, sizes = (self.k_cache, self.v_cache), (self.num_heads, self.num_kv_heads)
        if self.k_cache.numel() > 0 and context.slot_mapping is not None:
            store_kvcache(k, v, *caches, context.slot_mapping, self.block_size)
        if context.is_prefill:
            out = flash_attention_prefill(
                q, k, v, context.cu_seqlens_q, self.scale, *sizes, self.head_dim
            )
        else:
            out = paged_attention_decode(
                q, *caches, context.block_tables, context.context_lens, self.scale, *sizes,
                self.head_dim, self.block_size,
            )  # fmt: skip
        return out.reshape(-1, self.num_heads * self.head_dim)


def flash_attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> Tensor:
    out = torch.zeros(q.shape[0], num_heads, head_dim)
    bounds = cu_seqlens.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        for token in range(start, end):
            for head in range(num_heads):
                shared = head // (num_heads // num_kv_heads)
                keys, values = k[start : token + 1, shared], v[start : token + 1, shared]
                out[token, head] = ((keys @ q[token, head]) * scale).softmax(0) @ values
    return out


def paged_attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> Tensor:
    out = torch.zeros(query.shape[0], num_heads, head_dim)
    for sequence, length in enumerate(context_lens.tolist()):
        places = [
            (int(block_tables[sequence, i // block_size]), i % block_size) for i in range(length)
        ]
        for head in range(num_heads):
            shared = head // (num_heads // num_kv_heads)
            keys = torch.stack([k_cache[block, row, shared] for block, row in places])
            values = torch.stack([v_cache[block, row, shared] for block, row in places])
            out[sequence, head] = ((keys @ query[sequence, head]) * scale).softmax(0) @ values
    return out


def store_kvcache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_size: int,
) -> None:
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot != -1:
            k_cache[slot // block_size, slot % block_size] = key[token]
            v_cache[slot // block_size, slot % block_size] = value[token]


def tile_sizes(head_dim: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N) of the prefill kernel."""
    side = 64 if head_dim <= 64 else 32 if head_dim <= 128 else 16
    return side, side


def prefill_grid(cu_seqlens: Tensor, num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """The grid of the prefill kernel: tiles of queries, heads, sequences."""
    longest, rows = int(cu_seqlens.diff().max()), tile_sizes(head_dim)[0]
    return -(-longest // rows), num_heads, cu_seqlens.shape[0] - 1
