"""The weights themselves, for whoever wants to look at attention instead of running it."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.torch.batch import list_requests, on_host
from attnlib.ops.torch.general import attention_weights
from attnlib.ops.torch.paged import PagedInputs
from attnlib.ops.torch.quant import head_factor
from attnlib.ops.torch.request import rows_bias
from attnlib.ops.torch.rules import ScoreRules

__all__ = ["attention_scores"]


@torch.no_grad()
def attention_scores(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    causal: bool | Tensor = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk_size: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    query_bias: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
) -> list[Tensor]:
    """The weights after the softmax, per request: `[Hq, query_len, seq_len]` float32, 0 where a key is hidden.

    Takes the arguments of `paged_prefill`. A row sums to 1 without a sink, to less with one, and to 0 where it sees
    nothing. A request without query tokens yields a tensor of that shape without elements.
    """
    starts, lengths = on_host(query_start_loc, query_start_loc_cpu), on_host(seq_lens, seq_lens_cpu)
    rules = ScoreRules(scale, logits_soft_cap, alibi_slopes, window, attention_chunk_size, sinks)
    inputs = PagedInputs(
        query,
        key_cache,
        value_cache,
        block_table,
        query_bias,
        head_factor(k_scale),
        head_factor(v_scale),
    )
    num_heads = query.shape[1]
    weights = [
        query.new_zeros(num_heads, 0, seq_len, dtype=torch.float32) for seq_len in lengths.tolist()
    ]
    for request in list_requests(starts, lengths, causal):
        rows, span = inputs.rows(request), inputs.span(request, rules)
        whole = query.new_zeros(num_heads, request.query_len, request.seq_len, dtype=torch.float32)
        end = span.start + span.key.shape[0]
        if end > span.start:
            bias = rows_bias(rows, span.start, end, rules)
            whole[:, :, span.start : end] = attention_weights(
                rows.query, span.key, bias, rules, span.k_factor
            )[0]
        weights[request.index] = whole
    return weights
