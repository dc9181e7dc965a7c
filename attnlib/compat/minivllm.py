"""MinivLLM's attention layer: one module that owns its cache and picks prefill or decode.

    set_context(True, cu_seqlens_q=..., cu_seqlens_k=..., slot_mapping=...)
    output = attention(q, k, v)

Differences from `attnlib.Attention`, all as in MinivLLM: the batch comes from a global context, the
cache is in the attributes `k_cache` and `v_cache`, and `scale` is multiplied with
1 / sqrt(head_dim). The functions are those of `attnlib.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnlib.errors import ContractError
from attnlib.ops.addresses import check_starts
from attnlib.ops.dispatch import operation
from attnlib.ops.minivllm import (
    check_cache,
    check_table,
    flash_attention_prefill,
    paged_attention_decode,
    store_kvcache,
)
from attnlib.ops.params import AttentionParams

__all__ = [
    "Attention",
    "Context",
    "flash_attention_prefill",
    "get_context",
    "paged_attention_decode",
    "reset_context",
    "set_context",
    "store_kvcache",
]


@dataclass
class Context:
    """The batch that all layers of a step read. Tensors hold integers, of any integer dtype.

    Attributes:
        is_prefill: whether the step is a prefill.
        cu_seqlens_q: `[R + 1]`, the first new token of each sequence (prefill).
        cu_seqlens_k: `[R + 1]`, the first key of each sequence (prefill); None means
            `cu_seqlens_q`.
        max_seqlen_q: upper bound of the new tokens of a sequence; 0 means unknown.
        max_seqlen_k: upper bound of the keys of a sequence; 0 means unknown.
        slot_mapping: `[T]`, where new keys are written; -1 writes nothing.
        context_lens: `[R]`, keys of each sequence in the cache (decode).
        block_tables: `[R, max blocks]` (decode, and prefills over cached prefixes).
    """

    is_prefill: bool = False
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    slot_mapping: Tensor | None = None
    context_lens: Tensor | None = None
    block_tables: Tensor | None = None


_current = Context()


def get_context() -> Context:
    """The context of the current step."""
    return _current


def set_context(
    is_prefill: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    slot_mapping: Tensor | None = None,
    context_lens: Tensor | None = None,
    block_tables: Tensor | None = None,
) -> None:
    """Set the context of the next step; `Context` describes shapes and dtypes of the arguments."""
    global _current  # the original has one context per process, too
    _current = Context(
        is_prefill,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        slot_mapping,
        context_lens,
        block_tables,
    )


def reset_context() -> None:
    """Set an empty context."""
    set_context(False)


class Attention(nn.Module):
    """Attention over packed prompts (prefill) or the paged cache (decode).

    Args:
        num_heads: query heads.
        head_dim: elements of one head.
        scale: multiplied with 1 / sqrt(head_dim) to give the softmax scale.
        num_kv_heads: key and value heads; None means `num_heads`.
        block_size: tokens per cache block.

    Attributes:
        k_cache, v_cache: `[blocks, block_size, num_kv_heads, head_dim]`, assigned by the engine;
            empty at first, and then nothing is written.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scale: float = 1.0,
        num_kv_heads: int | None = None,
        block_size: int = 16,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.scale = scale / head_dim**0.5
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.block_size = block_size
        self.k_cache = self.v_cache = torch.empty(0, dtype=torch.float32, device="cpu")

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new keys and values where slots are given, then attend.

        Args:
            q: `[T, num_heads * head_dim]` or `[T, num_heads, head_dim]`, in the dtype
                of the caches.
            k: the same with `num_kv_heads`.
            v: likewise.

        Returns:
            `[T, num_heads * head_dim]`.

        Raises:
            ContractError: the context lacks what the step needs, or a tensor has another size.
        """
        context = get_context()
        q = q.view(-1, self.num_heads, self.head_dim)
        k = k.view(-1, self.num_kv_heads, self.head_dim)
        v = v.view(-1, self.num_kv_heads, self.head_dim)
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        self._check_step(q, context)
        if self.k_cache.numel() and context.slot_mapping is not None:
            store_kvcache(k, v, self.k_cache, self.v_cache, context.slot_mapping, self.block_size)
        if context.is_prefill and context.block_tables is not None:
            output = self._prefill_over_cache(q, context)
        elif context.is_prefill:
            starts = _required("cu_seqlens_q", context.cu_seqlens_q)
            output = flash_attention_prefill(q, k, v, starts, self.scale, *sizes)
        else:
            output = paged_attention_decode(
                q,
                self.k_cache,
                self.v_cache,
                _required("block_tables", context.block_tables),
                _required("context_lens", context.context_lens),
                self.scale,
                *sizes,
                self.block_size,
            )
        return output.flatten(1)

    def _check_step(self, q: Tensor, context: Context) -> None:
        """Check what is read from the cache before anything is written to it."""
        if context.is_prefill and context.block_tables is None:
            starts = _required("cu_seqlens_q", context.cu_seqlens_q)
            check_starts("cu_seqlens_q", starts, q.shape[0])
            return
        table, requests, lengths = context.block_tables, q.shape[0], context.context_lens
        if context.is_prefill:
            starts = _required("cu_seqlens_q", context.cu_seqlens_q)
            ends = starts if context.cu_seqlens_k is None else context.cu_seqlens_k
            if starts.dim() != 1 or starts.shape != ends.shape or not starts.shape[0]:
                raise ContractError(
                    f"cu_seqlens_q {tuple(starts.shape)} and cu_seqlens_k {tuple(ends.shape)} must "
                    "be [R + 1]"
                )
            check_starts("cu_seqlens_q", starts, q.shape[0])
            check_starts("cu_seqlens_k", ends, None)
            requests, lengths = starts.shape[0] - 1, ends[1:] - ends[:-1]
        check_cache(self.k_cache, self.v_cache, self.block_size)
        table, lengths = _required("block_tables", table), _required("context_lens", lengths)
        check_table(self.k_cache, requests, table, lengths)

    def _prefill_over_cache(self, q: Tensor, context: Context) -> Tensor:
        """New tokens over a cached prefix and each other, which the cache holds already."""
        starts = _required("cu_seqlens_q", context.cu_seqlens_q).to(torch.int32)
        ends = starts if context.cu_seqlens_k is None else context.cu_seqlens_k.to(torch.int32)
        table, output = _required("block_tables", context.block_tables), torch.empty_like(q)
        operation("paged_prefill", "paged_prefill", q)(
            q,
            self.k_cache,
            self.v_cache,
            table.to(torch.int32),
            starts,
            ends[1:] - ends[:-1],
            AttentionParams(scale=self.scale),
            max_query_len=context.max_seqlen_q or q.shape[0],
            max_seq_len=context.max_seqlen_k or table.shape[1] * self.block_size,
            out=output,
        )
        return output


def _required(name: str, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ContractError(f"the context has no {name}: pass it to set_context")
    return tensor
