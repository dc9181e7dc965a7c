"""The three functions of MinivLLM's attention layer: cache write, prefill and decode.

They are the operations `write_kv`, `varlen_prefill` and `paged_decode` behind plain argument lists:
outputs are allocated, lengths are bounded by the shapes of the arguments, and slots, tables and
lengths may have any integer dtype. On a GPU Triton serves them without a host sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.dispatch import operation
from attnlib.ops.params import AttentionParams

__all__ = ["flash_attention_prefill", "paged_attention_decode", "store_kvcache"]


def store_kvcache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_size: int,
) -> None:
    """Write keys and values to their slots.

    Args:
        key: `[T, Hkv, D]`.
        value: `[T, Hkv, D]`.
        k_cache: `[B, N, Hkv, D]`.
        v_cache: `[B, N, Hkv, D]`.
        slot_mapping: `[T]` of any integer dtype, slot = block * N + offset; -1 writes nothing.
        block_size: N.

    Raises:
        ContractError: a block size that is not that of the cache, or slots that do not fit the
            tokens (P4).
    """
    _check_block_size(k_cache, block_size)
    _check_integers("slot_mapping", slot_mapping)
    operation("cache_write", "write_kv", key)(key, value, k_cache, v_cache, slot_mapping.long())


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
    """Causal attention within each of the packed sequences.

    Args:
        q: `[T, num_heads, head_dim]`.
        k: `[T, num_kv_heads, head_dim]`.
        v: `[T, num_kv_heads, head_dim]`.
        cu_seqlens: `[R + 1]`, the first token of each sequence, then T.
        scale: factor of q . k, typically 1 / sqrt(head_dim).
        num_heads, num_kv_heads, head_dim: the sizes of the tensors.

    Returns:
        `[T, num_heads, head_dim]`.

    Raises:
        ContractError: tensors of other sizes.
    """
    _check_heads("q", q, num_heads, head_dim)
    _check_heads("k", k, num_kv_heads, head_dim)
    _check_heads("v", v, num_kv_heads, head_dim)
    starts, tokens, out = _int32("cu_seqlens", cu_seqlens), q.shape[0], torch.empty_like(q)
    operation("varlen_prefill", "varlen_prefill", q)(
        q, k, v, starts, starts, AttentionParams(scale=scale), max_seqlen_q=tokens,
        max_seqlen_k=tokens, out=out,
    )  # fmt: skip
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
    """Attention of one query token per sequence over the paged cache.

    Args:
        query: `[R, num_heads, head_dim]`.
        k_cache: `[B, N, num_kv_heads, head_dim]`.
        v_cache: `[B, N, num_kv_heads, head_dim]`.
        block_tables: `[R, max blocks]` of any integer dtype; unused entries may be -1.
        context_lens: `[R]`, keys of each sequence in the cache, the query's own included.
        scale: factor of q . k, typically 1 / sqrt(head_dim).
        num_heads, num_kv_heads, head_dim: the sizes of the tensors.
        block_size: N.

    Returns:
        `[R, num_heads, head_dim]`.

    Raises:
        ContractError: tensors of other sizes, or a block size that is not that of the cache.
    """
    _check_heads("query", query, num_heads, head_dim)
    _check_heads("k_cache", k_cache, num_kv_heads, head_dim)
    _check_heads("v_cache", v_cache, num_kv_heads, head_dim)
    _check_block_size(k_cache, block_size)
    num_reqs, out = query.shape[0], torch.empty_like(query)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=query.device)
    operation("paged_decode", "paged_decode", query)(
        query, k_cache, v_cache, _int32("block_tables", block_tables), starts,
        _int32("context_lens", context_lens), AttentionParams(scale=scale), max_query_len=1,
        max_seq_len=block_tables.shape[1] * block_size, out=out,
    )  # fmt: skip
    return out


def _check_heads(name: str, tensor: Tensor, heads: int, head_dim: int) -> None:
    if tuple(tensor.shape[-2:]) != (heads, head_dim):
        raise ContractError(
            f"{name} has shape {tuple(tensor.shape)}, but the arguments say {heads} heads of size "
            f"{head_dim}: pass the sizes of the tensor"
        )


def _check_block_size(cache: Tensor, block_size: int) -> None:
    if cache.dim() != 4 or cache.shape[1] != block_size:
        raise ContractError(
            f"the cache has shape {tuple(cache.shape)}; with block_size={block_size} it must be "
            f"[blocks, {block_size}, num_kv_heads, head_dim]"
        )


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ContractError(f"{name} has dtype {tensor.dtype}; it must hold integers")


def _int32(name: str, tensor: Tensor) -> Tensor:
    _check_integers(name, tensor)
    return tensor.to(torch.int32)
