"""Attention within sequences that lie anywhere in the packed tokens, with gaps or in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.request import KeySpan, QueryRows, attend_rows

__all__ = ["context_attention"]


@torch.no_grad()
@without_autocast
def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_seq_len: int,
    out: Tensor,
) -> None:
    """Attention of each sequence's tokens over the same tokens' keys.

    Args:
        query: `[T, Hq, D]`, any strides.
        key: `[T, Hkv, D]`, any strides.
        value: `[T, Hkv, Dv]`, any strides.
        start_loc: `[R]`, the first token of each sequence, in any order. Read on the host.
        seq_lens: `[R]`, tokens of each sequence. Read on the host.
        params: scale, causal (one flag) and window; other features are not supported.
        max_seq_len: upper bound of the sequence lengths. Ignored: the lengths themselves are read.
        out: `[T, Hq, Dv]`; rows of no sequence are left as they are.
    """
    for start, length in zip(start_loc.tolist(), seq_lens.tolist(), strict=True):
        if length == 0:
            continue
        tokens = slice(start, start + length)
        rows = QueryRows(query[tokens], 0, length, 0, bool(params.causal))
        attend_rows(rows, KeySpan(key[tokens], value[tokens]), params, out[tokens], None)
