"""Attention over packed keys and values without a cache: encoders, and decoders whose keys are all at hand."""

from __future__ import annotations

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.launch.signature import Options, refuse_batch_invariant
from attnlib.ops.triton.paged_prefill import launch_prefill

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
    """Attention of each request's queries over the same request's keys, both packed.

    Positions are aligned at the end: query token i has position key_len - query_len + i (M1).

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key: `[Tk, Hkv, D]`, last stride 1.
        value: `[Tk, Hkv, Dv]`, last stride 1.
        cu_seqlens_q: `[R + 1]` int32, the first query token of each request.
        cu_seqlens_k: `[R + 1]` int32, the first key of each request.
        params: how scores are computed, masked and scaled.
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: upper bound of the key lengths.
        out: `[T, Hq, Dv]`, last stride 1; rows at or past `cu_seqlens_q[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given; rows at or past `cu_seqlens_q[-1]` become -inf.
        cu_seqlens_q_cpu: ignored; see `attnlib.ops.torch.varlen_prefill`.
        cu_seqlens_k_cpu: ignored; likewise.
        batch_invariant: must be False; `attnlib.ops.torch` has batch-invariant operations.

    Raises:
        ContractError, UnsupportedConfigError: as `paged_prefill` raises them.
    """
    refuse_batch_invariant(batch_invariant)
    options = Options.from_params(params, out, lse)
    launch_prefill(
        query, key, value, None, cu_seqlens_q, cu_seqlens_k, max_query_len=max_seqlen_q, options=options,
    )  # fmt: skip
