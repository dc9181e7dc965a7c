"""The launch key: everything that grids, constants and kernels follow from, besides addresses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlib.ops.latent import values_are_prefix
from attnlib.ops.params import AttentionParams
from attnlib.ops.signature import scale_signature, tensor_signature
from attnlib.ops.triton.launch.score import score_signature

__all__ = ["call_signature"]


def call_signature(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    params: AttentionParams,
) -> tuple[Any, ...]:
    """The signature of a call made without a layer; a layer passes its own (`layer/call.py`)."""
    causal, alibi, sinks = params.causal, params.alibi_slopes, params.sinks
    return (
        *(tensor_signature(query), tensor_signature(key), tensor_signature(value)),
        *(values_are_prefix(key, value), tensor_signature(out)),
        None if lse is None else tensor_signature(lse),
        *(params.scale, params.window, params.attention_chunk_size),
        *(params.logits_soft_cap, params.allow_fp8_queries),
        causal if isinstance(causal, bool) else "per request",
        None if alibi is None else tensor_signature(alibi),
        None if sinks is None else tensor_signature(sinks),
        *(scale_signature(params.k_scale, key), scale_signature(params.v_scale, value)),
        *(params.k_format, params.v_format),
        score_signature(params),
    )
