"""The three functions of MinivLLM's attention layer: cache write, prefill and decode.

They are the operations `write_kv`, `varlen_prefill` and `paged_decode` behind plain argument lists:
outputs are allocated, lengths are bounded by the shapes of the arguments, and slots, tables and
lengths may have any integer dtype. On a GPU Triton serves them without a host sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.addresses import check_block_table, check_slot_values, check_starts
from attnlib.ops.dispatch import operation
from attnlib.ops.params import AttentionParams

__all__ = [
    "check_cache",
    "check_table",
    "flash_attention_prefill",
    "paged_attention_decode",
    "store_kvcache",
]


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
        ContractError: a block size that is not that of the cache, keys or slots that do not fit
            (P4), or, on a CPU and under ATTNLIB_VALIDATE, a slot past the cache.
    """
    check_cache(k_cache, v_cache, block_size)
    _check_integers("slot_mapping", slot_mapping)
    for name, new, cache in (("key", key, k_cache), ("value", value, v_cache)):
        if new.dim() != 3 or new.shape[1:] != cache.shape[2:]:
            raise ContractError(
                f"{name} has shape {tuple(new.shape)}; it must be [tokens, {cache.shape[2]}, "
                f"{cache.shape[3]}], like the cache",
                rule="P4",
            )
    check_slot_values(slot_mapping, k_cache.shape[0] * k_cache.shape[1])
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
        ContractError: tensors of other sizes, or, on a CPU and under ATTNLIB_VALIDATE, offsets that
            decrease or exceed the tokens.
    """
    _check_heads("q", q, num_heads, head_dim)
    _check_heads("k", k, num_kv_heads, head_dim)
    _check_heads("v", v, num_kv_heads, head_dim)
    starts, tokens, out = _int32("cu_seqlens", cu_seqlens), q.shape[0], torch.empty_like(q)
    if q.dim() != 3 or k.dim() != 3 or not tokens == k.shape[0] == v.shape[0]:
        raise ContractError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must be [tokens, "
            f"heads, {head_dim}] with as many tokens each"
        )
    check_starts("cu_seqlens", starts, tokens)
    operation("varlen_prefill", "varlen_prefill", q)(
        q,
        k,
        v,
        starts,
        starts,
        AttentionParams(scale=scale),
        max_seqlen_q=tokens,
        max_seqlen_k=tokens,
        out=out,
    )
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
        ContractError: tensors of other sizes, a block size that is not that of the cache, or, on a
            CPU and under ATTNLIB_VALIDATE, lengths past the table and blocks outside of the cache.
    """
    _check_heads("query", query, num_heads, head_dim)
    _check_heads("k_cache", k_cache, num_kv_heads, head_dim)
    _check_heads("v_cache", v_cache, num_kv_heads, head_dim)
    check_cache(k_cache, v_cache, block_size)
    check_table(k_cache, query.shape[0], block_tables, context_lens)
    num_reqs, out = query.shape[0], torch.empty_like(query)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=query.device)
    operation("paged_decode", "paged_decode", query)(
        query,
        k_cache,
        v_cache,
        _int32("block_tables", block_tables),
        starts,
        _int32("context_lens", context_lens),
        AttentionParams(scale=scale),
        max_query_len=1,
        max_seq_len=block_tables.shape[1] * block_size,
        out=out,
    )
    return out


def _check_heads(name: str, tensor: Tensor, heads: int, head_dim: int) -> None:
    if tuple(tensor.shape[-2:]) != (heads, head_dim):
        raise ContractError(
            f"{name} has shape {tuple(tensor.shape)}, but the arguments say {heads} heads of size "
            f"{head_dim}: pass the sizes of the tensor"
        )


def check_cache(k_cache: Tensor, v_cache: Tensor, block_size: int) -> None:
    """Whether two caches have blocks of this size.

    Raises:
        ContractError: they have another shape, or disagree.
    """
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or cache.shape[1] != block_size or cache.shape != k_cache.shape:
            raise ContractError(
                f"the cache has shape {tuple(cache.shape)} ({name}); with block_size={block_size} "
                f"it must be [blocks, {block_size}, num_kv_heads, head_dim]"
            )


def check_table(cache: Tensor, requests: int, block_tables: Tensor, lengths: Tensor) -> None:
    """Whether the blocks of requests exist; values on a CPU and under ATTNLIB_VALIDATE.

    Raises:
        ContractError: another number of requests, lengths past the table, or a block outside of
            the cache.
    """
    _check_integers("block_tables", block_tables)
    _check_integers("context_lens", lengths)
    if block_tables.dim() != 2 or block_tables.shape[0] != requests or lengths.shape != (requests,):
        raise ContractError(
            f"block_tables {tuple(block_tables.shape)} and context_lens {tuple(lengths.shape)} "
            f"must be [{requests}, blocks] and [{requests}], one row per sequence",
            rule="P3",
        )
    size, pool = cache.shape[1], cache.shape[0]
    check_block_table(block_tables, lengths, size, pool, what="context_lens")


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ContractError(f"{name} has dtype {tensor.dtype}; it must hold integers")


def _int32(name: str, tensor: Tensor) -> Tensor:
    _check_integers(name, tensor)
    return tensor.to(torch.int32)
