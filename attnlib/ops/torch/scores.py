"""Attention weights instead of attention outputs, for inspection."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.batch import list_requests, on_host
from attnlib.ops.torch.general import attention_weights
from attnlib.ops.torch.paged import PagedInputs
from attnlib.ops.torch.row_terms import rows_bias, rows_score

__all__ = ["attention_scores"]


@torch.no_grad()
def attention_scores(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
) -> list[Tensor]:
    """The weights after the softmax, per request.

    A row sums to 1 without a sink, to less than 1 with one, and to 0 where no key is visible.

    Args:
        query, key_cache, value_cache, block_table, query_start_loc, seq_lens, params,
            query_start_loc_cpu, seq_lens_cpu: as in `paged_prefill`.

    Returns:
        For each request `[Hq, query_len, seq_len]` float32, 0 where a key is hidden.
    """
    starts, lengths = on_host(query_start_loc, query_start_loc_cpu), on_host(seq_lens, seq_lens_cpu)
    inputs = PagedInputs(query, key_cache, value_cache, block_table, params)
    num_heads = query.shape[1]
    weights = [
        query.new_zeros(num_heads, 0, seq_len, dtype=torch.float32) for seq_len in lengths.tolist()
    ]
    for request in list_requests(starts, lengths, params.causal):
        rows, span = inputs.rows(request), inputs.span(request)
        whole = query.new_zeros(num_heads, request.query_len, request.seq_len, dtype=torch.float32)
        end = span.start + span.key.shape[0]
        if end > span.start:
            bias = rows_bias(rows, span.start, end, params)
            whole[:, :, span.start : end] = attention_weights(
                rows.query,
                span.key,
                bias,
                params,
                span.k_factor,
                rows_score(rows, span.start, end, params),
            )[0]
        weights[request.index] = whole
    return weights
