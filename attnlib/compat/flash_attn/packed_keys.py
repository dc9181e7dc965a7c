"""Attention over packed keys of sequences with lengths of their own, without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import torch

from attnlib.compat.flash_attn.arguments import (
    FlashAttentionArgumentError,
    argument_errors,
    check_tensor,
    last_stride_1,
)
from attnlib.compat.flash_attn.options import Options
from attnlib.errors import UnsupportedConfigError
from attnlib.ops.addresses import are_readable, check_starts
from attnlib.ops.params import AttentionParams
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec

__all__ = ["attend_packed", "check_packed", "rows_of"]

_OPERATIONS = ("torch", "triton")
"""Backends whose operation attends over packed keys with lengths of their own."""


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: Options,
    slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys without a cache: the operation of the selected backend, once or once per sequence.

    Args:
        q: `[T, Hq, D]`.
        k, v: `[Tk, Hkv, D]` and `[Tk, Hkv, Dv]`.
        starts, key_starts: `[B + 1]` int32.
        max_seqlen_q, max_seqlen_k: bounds of the lengths.
        options: of the call.
        slopes: `[1, Hq]` or `[B, Hq]`, or None.

    Returns:
        Output `[T, Hq, Dv]`, and LSE `[T, Hq]` or None.

    Raises:
        FlashAttentionArgumentError: shapes that disagree; on a CPU also sequences past their rows
            or longer than their bounds.
        UnsupportedConfigError: the selected backend has no such operation.
    """
    _check_keys(q, k, v)
    check_packed("cu_seqlens_q", starts, q.shape[0], max_seqlen_q)
    check_packed("cu_seqlens_k", key_starts, k.shape[0], max_seqlen_k)
    query, key, value = (last_stride_1(tensor) for tensor in (q, k, v))
    spec = options.spec(q.dtype, q.shape[1], k.shape[1], (q.shape[2], v.shape[2]), None)
    attend = _operation(spec, q.device)
    output = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    lse = None
    if options.lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    params = AttentionParams(
        scale=options.scale, causal=options.causal, window=spec.visible_window.as_kernel_args(),
        attention_chunk_size=options.chunk, logits_soft_cap=options.softcap,
        alibi_slopes=None if slopes is None else slopes[0],
    )  # fmt: skip
    bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if slopes is None or slopes.shape[0] == 1:
        attend(query, key, value, starts, key_starts, params, **bounds, out=output, lse=lse)
        return output, lse
    output.zero_()
    for request, (rows, keys) in enumerate(zip(rows_of(starts), rows_of(key_starts), strict=True)):
        own, ends = replace(params, alibi_slopes=slopes[request]), slice(request, request + 2)
        begin, key_begin = (x[ends] - x[request] for x in (starts, key_starts))
        attend(
            query[rows], key[keys], value[keys], begin, key_begin, own, **bounds, out=output[rows],
            lse=None if lse is None else lse[rows],
        )  # fmt: skip
    return output, lse


def rows_of(starts: torch.Tensor) -> list[slice]:
    """The rows of each sequence; reads `starts` on the host."""
    bounds = starts.tolist()
    return [slice(first, end) for first, end in pairwise(bounds)]


def _operation(spec: AttentionSpec, device: torch.device) -> Callable[..., None]:
    """`varlen_prefill` of the selected backend.

    Raises:
        UnsupportedConfigError: the selected backend has no such operation.
    """
    name = get_attn_backend(spec, None, device).get_name()
    if name not in _OPERATIONS:
        raise UnsupportedConfigError(
            f"backend {name} cannot attend over packed keys with lengths of their own: use "
            f"{' or '.join(_OPERATIONS)}, or pass paged keys with a block_table",
            backend=name,
            reasons=["cu_seqlens_k"],
        )
    operation: Callable[..., None] = import_module(
        f"attnlib.ops.{name}.varlen_prefill"
    ).varlen_prefill
    return operation


def _check_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        check_tensor(name, tensor, 3, "[tokens, KV heads, headdim]", q)
    if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2]:
        raise FlashAttentionArgumentError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must agree: k and v in "
            "tokens and heads, q and k in headdim"
        )


def check_packed(name: str, starts: torch.Tensor, rows: int, longest: int) -> None:
    """Whether sequences are inside their rows and their bound; values on a CPU, and elsewhere
    under ATTNLIB_VALIDATE.

    Raises:
        FlashAttentionArgumentError: names the offset or the length.
    """
    with argument_errors():
        check_starts(name, starts, rows)
    if starts.shape[0] > 1 and are_readable(starts) and int(starts.diff().max()) > longest:
        raise FlashAttentionArgumentError(
            f"{name} has a sequence of {int(starts.diff().max())} tokens, past its bound "
            f"max_seqlen={longest}"
        )
