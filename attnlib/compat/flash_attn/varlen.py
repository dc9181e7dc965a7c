"""`flash_attn_varlen_func` over attnlib's backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnlib.compat.flash_attn.arguments import (
    FlashAttentionArgumentError,
    check_tensor,
    integer,
    refuse,
    refuse_gradients,
)
from attnlib.compat.flash_attn.dense import NO_DROPOUT, with_probabilities
from attnlib.compat.flash_attn.execution import execution
from attnlib.compat.flash_attn.kvcache import flash_attn_with_kvcache
from attnlib.compat.flash_attn.options import Options, slopes_of
from attnlib.compat.flash_attn.packed_keys import attend_packed, check_packed, rows_of
from attnlib.compat.flash_attn.prepared import address, prepared

__all__ = ["flash_attn_varlen_func"]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Attention over packed sequences of different lengths.

    The signature is that of FlashAttention 2; keyword-only arguments are those of
    FlashAttention 3.

    Args:
        q: `[T, Hq, D]`.
        k: `[Tk, Hkv, D]`, or `[num_blocks, block_size, Hkv, D]` with a block table.
        v: `[Tk, Hkv, Dv]`, or `[num_blocks, block_size, Hkv, Dv]`.
        cu_seqlens_q: `[B + 1]` int32, first query of each sequence, then T.
        cu_seqlens_k: `[B + 1]` int32, likewise for keys; with a block table, its differences are
            the key lengths, and None is accepted with `seqused_k`.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. With a block table its width bounds
            the key lengths.
        dropout_p: must be 0.
        softmax_scale, causal, window_size, softcap, attention_chunk: as in
            `flash_attn_with_kvcache`.
        alibi_slopes: `[Hq]` or `[B, Hq]` float32. Slopes that differ between sequences cost one
            launch per sequence and reading the lengths on the host.
        deterministic: not read: equal calls give equal bits (M8), and there is no backward pass.
        return_attn_probs: also return the LSE and an empty tensor, as `flash_attn_func`.
        block_table: `[B, max_blocks]` int32.
        seqused_k: `[B]` int32, key lengths, with a block table.
        num_splits, pack_gqa, sm_margin: hints for the speed of FlashAttention's kernels, not read.
        seqused_q, qv, q_descale, k_descale, v_descale: refused.

    Returns:
        The output `[T, Hq, Dv]`; with `return_attn_probs` a triple with the LSE `[Hq, T]` float32
        (-inf for rows without visible keys) and an empty tensor.

    Raises:
        FlashAttentionArgumentError: a shape, dtype or device does not fit.
        UnsupportedConfigError: dropout, gradients, or another argument that is not served; or the
            selected backend cannot attend over packed keys (without a block table).
    """
    float8 = "attnlib's layers take float16, bfloat16 and float32 queries"
    refuse(
        dropout_p=(dropout_p, 0.0, NO_DROPOUT),
        seqused_q=(seqused_q, None, "query lengths follow from cu_seqlens_q"),
        qv=(qv, None, "attention with a second query for the values is not implemented"),
        q_descale=(q_descale, None, float8),
        k_descale=(k_descale, None, float8),
        v_descale=(v_descale, None, float8),
    )
    refuse_gradients(q, k, v)
    check_tensor("q", q, 3, "[tokens, heads, headdim]", q)
    check_tensor("cu_seqlens_q", cu_seqlens_q, 1, "[batch + 1]", q, torch.int32)
    requests = cu_seqlens_q.shape[0] - 1
    _check_starts("cu_seqlens_q", cu_seqlens_q, requests, q)
    if cu_seqlens_k is not None:
        _check_starts("cu_seqlens_k", cu_seqlens_k, requests, q)
    max_seqlen_q = integer("max_seqlen_q", max_seqlen_q, 0)
    max_seqlen_k = integer("max_seqlen_k", max_seqlen_k, 0)
    options = Options.of(
        q.shape[-1], softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
        max_query_len=max_seqlen_q, max_seq_len=max_seqlen_k, chunk=attention_chunk,
    )  # fmt: skip
    slopes = slopes_of(alibi_slopes, q, requests)
    if block_table is None:
        refuse(seqused_k=(seqused_k, None, "without a block table, key lengths follow from "
                          "cu_seqlens_k"))  # fmt: skip
        if cu_seqlens_k is None:
            raise FlashAttentionArgumentError("cu_seqlens_k=None without a block_table: pass both")
        result = attend_packed(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, slopes
        )
    else:
        result = _attend_paged(
            q, k, v, cu_seqlens_q, _key_lengths(cu_seqlens_k, seqused_k, q), max_seqlen_q,
            block_table, options, slopes,
        )  # fmt: skip
    output, lse = result
    if lse is None:
        return output
    return with_probabilities((output, lse.T.contiguous()), q)


def _check_starts(name: str, starts: torch.Tensor, requests: int, q: torch.Tensor) -> None:
    check_tensor(name, starts, 1, "[batch + 1]", q, torch.int32)
    if starts.shape[0] != requests + 1 or not starts.shape[0] or not starts.is_contiguous():
        raise FlashAttentionArgumentError(
            f"{name} has shape {tuple(starts.shape)} and strides {starts.stride()}; it must be "
            f"contiguous [{requests + 1}]"
        )


def _key_lengths(
    starts: torch.Tensor | None, lengths: torch.Tensor | None, q: torch.Tensor
) -> torch.Tensor:
    """`[B]` int32 key lengths of a paged call, computed on the device in every call."""
    if lengths is not None:
        return lengths
    if starts is None:
        raise FlashAttentionArgumentError(
            "cu_seqlens_k=None without seqused_k: pass the key lengths in one of them"
        )
    # One buffer for each tensor of starts, so that the prepared call behind it is found again.
    buffer = prepared(
        ("key lengths", address(starts), q.device),
        execution(q.get_device()),
        lambda: (starts, torch.empty_like(starts[1:])),
    )[1]
    return torch.sub(starts[1:], starts[:-1], out=buffer)


def _attend_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    max_seqlen_q: int,
    block_table: torch.Tensor,
    options: Options,
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys in blocks: a call of `flash_attn_with_kvcache`, or one per sequence."""

    check_packed("cu_seqlens_q", starts, q.shape[0], max_seqlen_q)
    check_tensor("block_table", block_table, 2, "[batch, max_blocks]", q, torch.int32)

    def attend(query: torch.Tensor, requests: slice, **others: Any) -> Any:
        return flash_attn_with_kvcache(
            query, k, v, cache_seqlens=lengths[requests], block_table=block_table[requests],
            softmax_scale=options.scale, causal=options.causal, window_size=options.window,
            softcap=options.softcap, return_softmax_lse=options.lse,
            attention_chunk=options.chunk, **others,
        )  # fmt: skip

    if slopes is None or slopes.shape[0] == 1:
        result = attend(
            q, slice(None), cu_seqlens_q=starts, max_seqlen_q=max_seqlen_q,
            alibi_slopes=None if slopes is None else slopes[0],
        )  # fmt: skip
        return (result[0], result[1].T) if options.lse else (result, None)
    output = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32) if options.lse else None
    for request, rows in enumerate(rows_of(starts)):
        if rows.start == rows.stop:
            continue
        one = slice(request, request + 1)
        result = attend(q[None, rows], one, alibi_slopes=slopes[request])
        output[rows] = result[0][0] if options.lse else result[0]
        if lse is not None:
            lse[rows] = result[1][0].T
    return output, lse
