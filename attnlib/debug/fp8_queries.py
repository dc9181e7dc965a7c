"""Attention with queries and weights rounded to e4m3 (M19), emulated in torch for the audit.

Each weight is rounded relative to the largest one of its row. Kernels that visit keys in tiles
round relative to the largest one so far, where small weights may keep more bits. Products are added
in float32.
"""

from __future__ import annotations

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.batch import Request, list_requests
from attnlib.ops.torch.general import attention_weights
from attnlib.ops.torch.paged import PagedInputs
from attnlib.ops.torch.row_terms import rows_bias, rows_score

__all__ = ["attend_with_rounded_weights", "round_queries", "rounded_requests"]

_SCORES = 1 << 24
"""Most scores that are held at a time: 64 MiB in float32."""


def rounded_requests(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, causal: bool | torch.Tensor
) -> list[Request]:
    """The requests whose queries are rounded: those with more than one query token.

    Args:
        query_start_loc, seq_lens, causal: of the batch.
    """
    requests = list_requests(query_start_loc.cpu(), seq_lens.cpu(), causal)
    return [request for request in requests if request.query_len > 1]


def round_queries(query: torch.Tensor) -> torch.Tensor:
    """Each query of a head as e4m3 numbers times the power of two that brings its largest magnitude
    to [2^7, 2^8), as in the Triton kernel.

    Args:
        query: `[T, Hq, D]` float32.

    Returns:
        The rounded values, `[T, Hq, D]` float32; NaN for queries with infinities.
    """
    largest = query.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest).exponent.clamp_min(-100)
    power = torch.ldexp(torch.ones_like(largest), 8 - exponent)
    power = torch.where(largest.isfinite(), power, torch.nan)
    return (query * power).to(torch.float8_e4m3fn).float() / power


def attend_with_rounded_weights(
    query: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    requests: list[Request],
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Write the output of requests with weights rounded to e4m3; other rows are not written.

    Args:
        query: `[T, Hq, D]` float32, rounded already.
        cache: a cache of e4m3 elements.
        block_table: `[R, M]`.
        requests: of `rounded_requests`.
        params: how scores are computed and masked, with the scales of the cache.
        out: `[T, Hq, Dv]` float32.
    """
    inputs = PagedInputs(query, cache.key_cache, cache.value_cache, block_table, params)
    for request in requests:
        rows, span = inputs.rows(request), inputs.span(request)
        start, end = span.start, span.start + span.key.shape[0]
        if end == start:
            continue  # no key is visible, and the output is 0
        factor = span.v_factor
        value = span.value.float() * (
            factor.view(-1, 1) if isinstance(factor, torch.Tensor) else factor
        )
        step = max(1, _SCORES // (query.shape[1] * (end - start)))
        for first in range(0, request.query_len, step):
            block = rows.select(first, min(first + step, request.query_len))
            weights, _, empty = attention_weights(
                block.query,
                span.key,
                rows_bias(block, start, end, params),
                params,
                span.k_factor,
                rows_score(block, start, end, params),
            )
            grouped = _round_weights(weights).view(value.shape[1], -1, *weights.shape[1:])
            begin, count = request.start + first, block.query.shape[0]
            result = torch.einsum("hgls,shd->lhgd", grouped, value).flatten(1, 2)
            out[begin : begin + count] = result.masked_fill(empty.T.unsqueeze(-1), 0.0)


def _round_weights(weights: torch.Tensor) -> torch.Tensor:
    """Weights `[Hq, L, S]`, each relative to the largest one of its row as an e4m3 number / 2^8."""
    unit = weights.amax(-1, keepdim=True).clamp_min(2.0**-100) * 2.0**-8
    return (weights / unit).to(torch.float8_e4m3fn).float() * unit
