"""`flash_attn_func` over attnlib's backends: keys `[B, Sk, Hkv, D]` are read as a filled cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnlib.compat.flash_attn.arguments import (
    FlashAttentionArgumentError,
    check_tensor,
    last_stride_1,
    refuse,
    refuse_gradients,
)
from attnlib.compat.flash_attn.kvcache import flash_attn_with_kvcache

__all__ = ["NO_DROPOUT", "flash_attn_func", "with_probabilities"]

NO_DROPOUT = "dropout is for training, and attnlib has a forward pass only: pass 0.0"


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Attention over dense keys and values.

    The signature is that of FlashAttention 2; keyword-only arguments are those of
    FlashAttention 3.

    Args:
        q, k, v: `[B, Sq, Hq, D]`, `[B, Sk, Hkv, D]` and `[B, Sk, Hkv, Dv]`.
        dropout_p: must be 0.
        softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk: as in
            `flash_attn_with_kvcache`.
        deterministic: not read: equal calls give equal bits (M8), and there is no backward pass.
        return_attn_probs: also return the LSE and an empty tensor in place of the probabilities,
            as FlashAttention does without dropout.
        num_splits, pack_gqa, sm_margin: hints for the speed of FlashAttention's kernels, not read.
        qv, q_descale, k_descale, v_descale: refused.

    Returns:
        The output `[B, Sq, Hq, Dv]`; with `return_attn_probs` a triple with the LSE `[B, Hq, Sq]`
        float32 (-inf for rows without visible keys) and an empty tensor.

    Raises:
        FlashAttentionArgumentError: a shape, dtype or device does not fit.
        UnsupportedConfigError: dropout, gradients, or another argument that is not served.
    """
    refuse(dropout_p=(dropout_p, 0.0, NO_DROPOUT))
    _check_batch(q, k, v)
    if not k.shape[1] or not q.shape[0]:  # no key: a cache needs at least one token
        output = _without_keys(q, v)
        return with_probabilities(output, q) if return_attn_probs else output[0]
    if v.data_ptr() == k.data_ptr() and v.stride() == k.stride():
        v = v.clone()  # a cache whose values are its keys is one of latent vectors
    result = flash_attn_with_kvcache(
        q, last_stride_1(k), last_stride_1(v), softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, qv=qv,
        return_softmax_lse=return_attn_probs, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip
    return with_probabilities(result, q) if return_attn_probs else result


def with_probabilities(result: Any, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(output, LSE, empty tensor), FlashAttention's result for `return_attn_probs`."""
    return (*result, q.new_empty(0))


def _check_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    refuse_gradients(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, 4, "[batch, seqlen, heads, headdim]", q)
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        raise FlashAttentionArgumentError(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; they must "
            "have one batch size, and k and v one seqlen and number of heads"
        )


def _without_keys(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output 0 and LSE -inf (M5)."""
    output = q.new_zeros(*q.shape[:3], v.shape[-1])
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
    return output, lse
