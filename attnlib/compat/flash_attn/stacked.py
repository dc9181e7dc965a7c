"""FlashAttention's functions for stacked q, k, v or k, v; the parts are views, not copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnlib.compat.flash_attn.arguments import FlashAttentionArgumentError, check_tensor
from attnlib.compat.flash_attn.dense import flash_attn_func
from attnlib.compat.flash_attn.varlen import flash_attn_varlen_func

__all__ = [
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of stacked tensors, `qkv` `[B, S, 3, H, D]`. Other arguments, dtypes,
    result and errors are those of `flash_attn_func`."""
    q, k, v = _parts("qkv", qkv, "[batch, seqlen, 3, heads, headdim]")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of stacked tensors, `kv` `[B, Sk, 2, Hkv, D]`. Other arguments, dtypes,
    result and errors are those of `flash_attn_func`."""
    k, v = _parts("kv", kv, "[batch, seqlen, 2, heads, headdim]")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of stacked tensors, `qkv` `[T, 3, H, D]`. Other arguments, dtypes,
    result and errors are those of `flash_attn_varlen_func`."""
    q, k, v = _parts("qkv", qkv, "[tokens, 3, heads, headdim]")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
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
) -> Any:
    """`flash_attn_varlen_func` of stacked tensors, `kv` `[Tk, 2, Hkv, D]`. Other arguments, dtypes,
    result and errors are those of `flash_attn_varlen_func`."""
    k, v = _parts("kv", kv, "[tokens, 2, heads, headdim]")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def _parts(name: str, stacked: torch.Tensor, shape: str) -> tuple[torch.Tensor, ...]:
    """The tensors that are stacked in the dimension before the heads.

    Raises:
        FlashAttentionArgumentError: another shape.
    """
    sizes = shape.strip("[]").split(", ")
    check_tensor(name, stacked, len(sizes), shape, stacked)
    if stacked.shape[-3] != int(sizes[-3]):
        raise FlashAttentionArgumentError(
            f"{name} has shape {tuple(stacked.shape)}; it must be {shape}"
        )
    return stacked.unbind(-3)
