"""Prefill over the paged cache: whole prompts, chunks over a long context, and batches that mix both with decodes."""

from __future__ import annotations

from torch import Tensor

from attnlib.ops.triton.kernels.prefill import launch_prefill
from attnlib.ops.triton.launch.signature import Options

__all__ = ["paged_prefill"]


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool | Tensor = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_bias: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    out: Tensor,
    lse: Tensor | None = None,
    kernels: str = "auto",
    counters: Tensor | None = None,
) -> None:
    """Attention of ragged query spans over the paged cache.

    Query i of request r stands at position p = seq_len - query_len + i and sees the keys k in [0, seq_len) with k <= p
    (causal), p - left <= k <= p + right (window) and k // chunk == p // chunk (chunk).

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key_cache: `[B, N, Hkv, D]`, any strides but the last (P1); float8 holds key / k_scale.
        value_cache: `[B, N, Hkv, Dv]`, likewise.
        block_table: `[R, M]` int32; entries at or past ceil(seq_len / N) are never read (P3).
        query_start_loc: `[R + 1]` int32, where each request's tokens start.
        seq_lens: `[R]` int32, context and this step's tokens.
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of the sequence lengths.
        scale: factor of q . k.
        causal: for all requests, or a bool tensor `[R]`.
        window: keys visible (before, after) the query's own; -1 is unbounded, 0 is none.
        attention_chunk_size: positions per attention chunk; 0 is none.
        logits_soft_cap: c of c * tanh(score / c); 0 is none.
        alibi_slopes: `[Hq]` float32; subtracts slope * |p - k|.
        sinks: `[Hq]` float32; one more logit per head, in the denominator only (M4).
        query_bias: `[T, >= max_query_len]` float32, added to the scores of the query span's keys; -inf hides.
        k_scale: a number, a 0-d or `[Hkv]` float32 tensor.
        v_scale: likewise.
        out: `[T, Hq, Dv]`, written; rows at or past `query_start_loc[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given: natural log of the softmax denominator (M5).
        kernels: "auto" takes the Hopper prefill where it can serve the call, "portable" always the plain kernel.
        counters: int32 zeros, by the first two of which the programs of the Hopper prefill share the work, and which it leaves as
            it found them; made when None or fewer. Calls that may overlap need counters of their own.

    Raises:
        ContractError: tensors the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the chip.
    """
    options = Options(scale, causal, window, attention_chunk_size, logits_soft_cap, alibi_slopes, sinks, query_bias,
                      k_scale, v_scale, out, lse)  # fmt: skip
    launch_prefill(
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens, max_query_len=max_query_len,
        options=options, max_seq_len=max_seq_len, kernels=kernels, counters=counters,
    )  # fmt: skip
