"""Attention over packed keys and values without a cache: encoders, and uncached decoders."""

from __future__ import annotations

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.launch.attention import BatchTensors
from attnlib.ops.triton.launch.run import run_attention
from attnlib.ops.triton.launch.signature import call_signature
from attnlib.ops.triton.paged_prefill import prepare_plain_prefill

__all__ = ["varlen_prefill"]


def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    params: AttentionParams,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    out: Tensor,
    lse: Tensor | None = None,
    cu_seqlens_q_cpu: Tensor | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Attention of request r's queries over request r's keys, both packed without padding.

    Positions are aligned bottom-right: query i is at key length - query length + i (M1).

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key: `[Tk, Hkv, D]`, last stride 1.
        value: `[Tk, Hkv, Dv]`, last stride 1.
        cu_seqlens_q: `[R + 1]` int32, where each request's queries start.
        cu_seqlens_k: `[R + 1]` int32, where each request's keys start.
        params: how scores are computed, masked and scaled.
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: upper bound of the key lengths.
        out: `[T, Hq, Dv]`, written; rows at or past `cu_seqlens_q[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given.
        cu_seqlens_q_cpu: ignored; see `attnlib.ops.torch.varlen_prefill`.
        cu_seqlens_k_cpu: ignored, likewise.
        batch_invariant: the bits of a row depend on that row and its keys only (M15).

    Raises:
        ContractError, UnsupportedConfigError: as `paged_prefill`.
    """
    if query.numel() == 0:
        return
    flags = params.causal if isinstance(params.causal, Tensor) else None
    batch = BatchTensors(
        cu_seqlens_q, cu_seqlens_k, None, flags, params.query_bias,
        score_tensors=params.batch_score_tensors(),
    )  # fmt: skip
    if batch_invariant:
        from attnlib.ops.triton.invariant_attention import run_invariant_prefill

        run_invariant_prefill(query, key, value, out, lse, batch, params, max_seqlen_q)
        return
    prepared = prepare_plain_prefill(
        call_signature(query, key, value, out, lse, params), query, key, value, out, lse, batch,
        params, limits_of(query), max_seqlen_q,
    )  # fmt: skip
    run_attention(prepared, batch, query, key, value, out, lse, params)
