"""The parameters of one attention call, as one value that every operation takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AttentionParams"]


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionParams:
    """How scores are computed and masked (M3, M4), and how a quantized cache is scaled (M9).

    Attributes:
        scale: factor of q . k.
        causal: for all requests, or a bool tensor `[R]`, one flag per request.
        window: keys visible (before, after) the query's own; -1 is unbounded, 0 is none (M2).
        attention_chunk_size: positions per attention chunk; 0 is none.
        logits_soft_cap: c of `c * tanh(score / c)`; 0 is none.
        alibi_slopes: `[Hq]` float32; `slope * |p - k|` is subtracted from the score.
        sinks: `[Hq]` float32; one more logit per head, in the denominator only (M4).
        query_bias: `[T, >= max_query_len]` float32, added to the scores of the query span's keys;
            -inf hides a key.
        k_scale: real key = stored key * k_scale; a number, a 0-d or `[Hkv]` float32 tensor.
        v_scale: the same for values.
    """

    scale: float
    causal: bool | Tensor = True
    window: tuple[int, int] = (-1, -1)
    attention_chunk_size: int = 0
    logits_soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    query_bias: Tensor | None = None
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0
