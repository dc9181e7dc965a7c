"""`flash_attn_with_kvcache` over attnlib's backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from attnlib.compat.flash_attn.arguments import (
    FlashAttentionArgumentError,
    flag,
    integer,
    refuse,
    refuse_gradients,
)
from attnlib.compat.flash_attn.execution import execution
from attnlib.compat.flash_attn.kvcache_arguments import CallTensors, ScoreArguments
from attnlib.compat.flash_attn.kvcache_call import KVCacheCall
from attnlib.compat.flash_attn.kvcache_checks import check_kvcache_call
from attnlib.compat.flash_attn.options import slopes_of
from attnlib.compat.flash_attn.prepared import STATE, address, prepared, signature
from attnlib.compat.flash_attn.recent_call import RecentCall
from attnlib.compat.flash_attn.rotary import rotate_query_and_key
from attnlib.instrumentation import ENVIRONMENT, OBSERVERS, VALIDATE_KEY

__all__ = ["flash_attn_with_kvcache"]

_FP8 = "attnlib's layers take float16, bfloat16 and float32 queries; use a float8 PagedKVCache"


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Append new keys and values to a KV cache in place, then attend over the cache.

    The signature is that of FlashAttention 2; keyword-only arguments are those of
    FlashAttention 3. Lengths and tables are read on the device when the kernels run: their values
    may change in place between calls, and a CUDA graph can capture the call.

    Args:
        q: `[B, Sq, Hq, D]`; `[T, Hq, D]` with `cu_seqlens_q`.
        k_cache: `[B_cache, S, Hkv, D]`, or `[num_blocks, block_size, Hkv, D]` with a block table;
            any block size, any strides, the last one 1.
        v_cache: likewise, with values `[..., Dv]`.
        k, v: `[B, Snew, Hkv, D]` and `[B, Snew, Hkv, Dv]`, written to the cache at the positions
            `cache_seqlens`, `cache_seqlens + 1`, ...
        rotary_cos, rotary_sin: `[positions, rotary_dim / 2]`; `q` and `k` are rotated by torch
            operations. Requires `k`.
        cache_seqlens: cached tokens without the new ones, an int or `[B]` int32. None means that
            the whole cache is filled.
        cache_batch_idx: `[B]` int32 or int64, row of the cache of each request; without block
            table.
        cache_leftpad: `[B]` int32, first token of each request; without block table.
        block_table: `[B, max_blocks]` int32 (P3).
        softmax_scale: None means `1 / sqrt(D)`.
        causal: causal mask, aligned bottom-right.
        window_size: visible keys (left, right) of a query's own position, -1 for all.
        softcap: c of `c * tanh(score / c)`; 0 for none.
        rotary_interleaved: rotate neighboring elements; else the two halves (GPT-NeoX).
        alibi_slopes: `[Hq]` or `[B, Hq]` float32. Slopes that differ between requests cost one
            launch per request.
        num_splits, scheduler_metadata, pack_gqa, sm_margin: hints for the speed of FlashAttention's
            kernels, not read.
        return_softmax_lse: also return the LSE.
        page_table: FlashAttention 3's name of `block_table`.
        cu_seqlens_q: `[B + 1]` int32, first query of each request, for packed queries without `k`.
        max_seqlen_q: upper bound of the query lengths, with `cu_seqlens_q`.
        attention_chunk: positions per attention chunk; 0 for none.
        cu_seqlens_k_new, rotary_seqlens, qv, q_descale, k_descale, v_descale: refused.

    Returns:
        The output, `[B, Sq, Hq, Dv]` or `[T, Hq, Dv]`; with `return_softmax_lse` a pair with the
        LSE, `[B, Hq, Sq]` or `[Hq, T]` float32, natural logarithm, -inf for rows without visible
        keys (as FlashAttention 3; FlashAttention 2 returns +inf).

    Raises:
        FlashAttentionArgumentError: a shape, dtype or device does not fit, or lengths on a CPU
            exceed the cache. Nothing is written then. Lengths on a GPU are not read by the host
            (ATTNLIB_VALIDATE checks them): tokens past the end of the block table are not written.
        UnsupportedConfigError: an argument that is not served, or no backend supports the call.
    """
    recent = STATE.recent
    if (
        recent is not None
        and rotary_cos is None
        and cache_batch_idx is None
        and cache_leftpad is None
        and alibi_slopes is None
        and cu_seqlens_q is None
        and page_table is None
        and qv is None
        and q_descale is None
        and k_descale is None
        and v_descale is None
        and recent.arguments
        == (softmax_scale, causal, window_size, softcap, attention_chunk, return_softmax_lse)
        and not OBSERVERS
        and VALIDATE_KEY not in ENVIRONMENT
        and forward_ad._current_level < 0
        and (result := recent.run(q, k_cache, v_cache, k, v, cache_seqlens, block_table))
        is not None
    ):
        return result
    refuse(
        qv=(qv, None, "attention with a second query for the values is not implemented"),
        q_descale=(q_descale, None, _FP8),
        k_descale=(k_descale, None, _FP8),
        v_descale=(v_descale, None, _FP8),
        cu_seqlens_k_new=(cu_seqlens_k_new, None, "new keys must be [B, Snew, Hkv, D]"),
        rotary_seqlens=(rotary_seqlens, None, "positions follow from cache_seqlens"),
    )
    refuse_gradients(q, k, v, k_cache, v_cache)
    if page_table is not None and block_table is not None:
        raise FlashAttentionArgumentError("block_table and page_table are one argument: pass one")
    if rotary_sin is not None and rotary_cos is None:
        raise FlashAttentionArgumentError("rotary_sin is given and rotary_cos is None: pass both")
    table = block_table if page_table is None else page_table
    tensors = CallTensors(
        q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, table,
        cu_seqlens_q, None if max_seqlen_q is None else integer("max_seqlen_q", max_seqlen_q),
    )  # fmt: skip
    scores = ScoreArguments(
        softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk,
        return_softmax_lse,
    )  # fmt: skip
    interleaved = flag("rotary_interleaved", rotary_interleaved)
    return _attend(tensors, scores, (rotary_cos, rotary_sin, interleaved))


def _attend(
    given: CallTensors,
    scores: ScoreArguments,
    rotary: tuple[torch.Tensor | None, torch.Tensor | None, bool],
) -> Any:
    """A call that is not like the one before."""
    call_tensors = given.with_last_stride_1()
    q, k_cache, v_cache, k, v, lens, index, leftpad, table, starts, longest = call_tensors
    cos, sin, interleaved = rotary
    check_kvcache_call(*call_tensors, cos)
    options = scores.options(call_tensors)
    slopes = slopes_of(scores.alibi_slopes, q, call_tensors.num_requests)
    where = execution(q.get_device())
    key = (
        "kvcache", options, *map(signature, (q, k_cache, v_cache, k, v)), q.device,
        *map(address, (table, index, leftpad, starts)), longest,
        isinstance(lens, int) or address(lens),
    )  # fmt: skip
    tensors, packed = call_tensors[:9], (starts, longest)
    call = prepared(key, where, lambda: KVCacheCall(options, where, tensors, packed))
    lengths = call.lengths(lens)
    if cos is not None:
        assert k is not None  # `check_kvcache_call` refuses rotary embedding without new keys
        local = bool(scores.causal) or any(int(side) >= 0 for side in scores.window_size)
        q, k = rotate_query_and_key(
            q, k, cos, sin, lengths, interleaved=interleaved, same_query_position=not local
        )
    result = call.attend(q, k_cache, v_cache, k, v, index, leftpad, slopes)
    if cos is None and call.is_simple:
        unchanged = (q, k_cache, v_cache, k, v, lens, table)
        before = (*given[:6], given.table)
        if all(x is y for x, y in zip(before, unchanged, strict=True)):
            STATE.recent = RecentCall.of(call, unchanged, (
                scores.softmax_scale, scores.causal, scores.window_size, scores.softcap,
                scores.attention_chunk, scores.return_softmax_lse,
            ))  # fmt: skip
    return result
