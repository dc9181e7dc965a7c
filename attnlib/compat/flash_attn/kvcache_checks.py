"""Checks of the arguments of `flash_attn_with_kvcache`."""

from __future__ import annotations

import torch

from attnlib.cache.overlap import check_pair
from attnlib.compat.flash_attn.arguments import (
    FlashAttentionArgumentError,
    argument_errors,
    check_tensor,
)

__all__ = ["check_kvcache_call"]

_INT32 = torch.iinfo(torch.int32).max


def check_kvcache_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    lens: int | torch.Tensor | None,
    index: torch.Tensor | None,
    leftpad: torch.Tensor | None,
    table: torch.Tensor | None,
    starts: torch.Tensor | None,
    longest: int | None,
    rotary_cos: torch.Tensor | None,
) -> None:
    """Shapes, dtypes and devices of a call; arguments as in `flash_attn_with_kvcache`.

    Raises:
        FlashAttentionArgumentError: an argument does not fit; the message names it.
    """
    heads = "headdim]"
    if starts is None:
        check_tensor("q", q, 4, f"[batch, seqlen, heads, {heads}", q)
        requests = q.shape[0]
    else:
        check_tensor("q", q, 3, f"[tokens, heads, {heads} with cu_seqlens_q", q)
        check_tensor("cu_seqlens_q", starts, 1, "[batch + 1]", q, torch.int32)
        requests = starts.shape[0] - 1
        is_short = longest is None or longest < min(q.shape[0], 1)
        if is_short or requests < 0 or not starts.is_contiguous():
            raise FlashAttentionArgumentError(
                f"cu_seqlens_q {tuple(starts.shape)} with max_seqlen_q={longest}: it must be "
                "contiguous [batch + 1], and max_seqlen_q at least 1"
            )
        if k is not None:
            raise FlashAttentionArgumentError(
                "k with cu_seqlens_q: new keys need queries [batch, seqlen, heads, headdim]"
            )
    _check_caches(q, k_cache, v_cache)
    _check_rows(q, k_cache, index, leftpad, table, requests)
    if isinstance(lens, torch.Tensor):
        _check_per_request("cache_seqlens", lens, q, requests, (torch.int32,))
    elif lens is not None and not (isinstance(lens, int) and 0 <= lens <= _INT32):
        raise FlashAttentionArgumentError(
            f"cache_seqlens={lens!r} must be an int from 0 to {_INT32}, or [{requests}] int32"
        )
    if (k is None) != (v is None):
        raise FlashAttentionArgumentError("k and v: pass both or neither")
    if k is not None and v is not None:
        _check_new_keys(q, k_cache, v_cache, k, v, lens)
        with argument_errors():
            check_pair(k_cache=k_cache, v_cache=v_cache)
        if rotary_cos is not None:
            _check_positions(rotary_cos, k_cache, table)
    elif rotary_cos is not None:
        raise FlashAttentionArgumentError(
            "rotary_cos without k and v: the keys to rotate are new ones"
        )


def _check_caches(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, 4, "[batch or blocks, tokens, KV heads, headdim]", q)
        if cache.stride(3) != 1 and cache.shape[3] > 1:
            raise FlashAttentionArgumentError(
                f"{name} has last stride {cache.stride(3)}; it must be 1, because the cache is "
                "not copied"
            )
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.shape[3] != q.shape[-1]:
        raise FlashAttentionArgumentError(
            f"k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)} and q "
            f"{tuple(q.shape)} must agree in blocks, tokens, KV heads and headdim"
        )
    if not k_cache.shape[1]:
        raise FlashAttentionArgumentError("k_cache has no token per sequence or block")


def _check_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    index: torch.Tensor | None,
    leftpad: torch.Tensor | None,
    table: torch.Tensor | None,
    requests: int,
) -> None:
    if table is not None:
        check_tensor("block_table", table, 2, "[batch, max_blocks]", q, torch.int32)
        if table.shape[0] != requests or not table.shape[1]:
            raise FlashAttentionArgumentError(
                f"block_table has shape {tuple(table.shape)}; it must be [{requests}, at least 1]"
            )
        if index is not None or leftpad is not None:
            name = "cache_leftpad" if index is None else "cache_batch_idx"
            raise FlashAttentionArgumentError(f"{name} with a block_table: the table says it all")
        return
    if index is not None:
        _check_per_request("cache_batch_idx", index, q, requests, (torch.int32, torch.int64))
    elif k_cache.shape[0] < requests:
        raise FlashAttentionArgumentError(
            f"k_cache holds {k_cache.shape[0]} sequences for {requests} requests"
        )
    if leftpad is not None:
        _check_per_request("cache_leftpad", leftpad, q, requests, (torch.int32,))


def _check_per_request(
    name: str,
    tensor: torch.Tensor,
    q: torch.Tensor,
    requests: int,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    given = getattr(tensor, "dtype", None)
    dtype = given if given in dtypes else dtypes[0]
    check_tensor(name, tensor, 1, f"[{requests}]", q, dtype)
    if tensor.shape != (requests,) or not tensor.is_contiguous():
        raise FlashAttentionArgumentError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be "
            f"contiguous [{requests}]"
        )


def _check_new_keys(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: int | torch.Tensor | None,
) -> None:
    if lens is None:
        raise FlashAttentionArgumentError("k and v without cache_seqlens: where to write them?")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_tensor(name, new, 4, "[batch, new tokens, KV heads, headdim]", q)
        if (new.shape[0], *new.shape[2:]) != (q.shape[0], *cache.shape[2:]):
            raise FlashAttentionArgumentError(
                f"{name} has shape {tuple(new.shape)}; it must be "
                f"[{q.shape[0]}, new tokens, {cache.shape[2]}, {cache.shape[3]}]"
            )
    if k.shape[1] != v.shape[1]:
        raise FlashAttentionArgumentError(f"k has {k.shape[1]} new tokens, v {v.shape[1]}")


def _check_positions(cos: torch.Tensor, k_cache: torch.Tensor, table: torch.Tensor | None) -> None:
    """Whether there is an angle for each position of the cache, as FlashAttention requires."""
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    if getattr(cos, "ndim", 0) == 2 and cos.shape[0] < capacity:
        raise FlashAttentionArgumentError(
            f"rotary_cos has {cos.shape[0]} positions, and the cache holds {capacity} tokens per "
            "request: pass an angle for each position"
        )
