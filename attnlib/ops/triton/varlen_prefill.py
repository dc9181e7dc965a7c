"""Attention over packed keys and values without a cache: encoders, and decoders whose keys are all at hand."""

from __future__ import annotations

from torch import Tensor

from attnlib.ops.triton.launch.signature import Options
from attnlib.ops.triton.paged_prefill import launch_prefill

__all__ = ["varlen_prefill"]


def varlen_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool | Tensor = False,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_bias: Tensor | None = None,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Attention of request r's queries over request r's keys, both packed without padding.

    Positions are bottom-right aligned as everywhere: query i stands at key length - query length + i (M1).

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key: `[Tk, Hkv, D]`, last stride 1.
        value: `[Tk, Hkv, Dv]`, last stride 1.
        cu_seqlens_q: `[R + 1]` int32, where each request's queries start.
        cu_seqlens_k: `[R + 1]` int32, where each request's keys start.
        max_seqlen_q: upper bound of the query lengths.
        max_seqlen_k: upper bound of the key lengths.
        out: `[T, Hq, Dv]`, written; rows at or past `cu_seqlens_q[-1]` become 0 (M6).
        lse: `[T, Hq]` float32, written when given.

    The other arguments and the errors are those of `paged_prefill`.
    """
    options = Options(scale, causal, window, attention_chunk_size, logits_soft_cap, alibi_slopes, sinks, query_bias,
                      1.0, 1.0, out, lse)  # fmt: skip
    launch_prefill(
        query, key, value, None, cu_seqlens_q, cu_seqlens_k, max_query_len=max_seqlen_q, options=options,
    )  # fmt: skip
