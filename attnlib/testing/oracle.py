"""Reference attention in float64: the oracle of the conformance suite.

The implementation follows the M-rules of docs/semantics.md one request at a time: gather the keys,
compute the scores, apply the mask, weight the values. It is simple and slow, and it imports nothing
from attnlib, so that it shares no code with any backend. The tests compare it with a triple loop
and with torch's scaled_dot_product_attention.

`precision` repeats the computation in another dtype. `torch.float64` gives the expected result. The
dtype of the inputs gives the error of a plain computation in that precision, which defines the
error budget (`attnlib.testing.budget`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

__all__ = [
    "OracleResult",
    "OracleParams",
    "gather_tokens",
    "paged_attention",
    "unpaged_attention",
    "visible_keys",
]


@dataclass(frozen=True, kw_only=True)
class OracleParams:
    """The parameters of the attention computation.

    Attributes:
        scale: factor of q . k.
        causal: one value for the batch, or [R] bool, one for each request.
        window: number of visible keys before and after the query's own key (M2); -1 is unbounded.
        attention_chunk_size: only keys in the query's chunk are visible; 0 disables chunks.
        logits_soft_cap: c of c * tanh(score / c); 0 disables the cap.
        alibi_slopes, sinks: [Hq] float32, or None. Sinks of query tokens are [T, Hq] (M22).
        query_bias: [T, >= max query_len] float32, added to the scores of this step's keys; -inf
            masks a key. None adds nothing.
        score: function (request, scores, query positions, key positions, heads) that returns other
            scores (M10); or None.
        selected: per request the selected keys [Hq, query_len, seq_len] bool (M11); None for all.
        k_scale, v_scale: factor of the stored keys and values (M9), a number or [Hkv].
    """

    scale: float
    causal: bool | torch.Tensor = True
    window: tuple[int, int] = (-1, -1)
    attention_chunk_size: int = 0
    logits_soft_cap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    query_bias: torch.Tensor | None = None
    score: Callable[..., torch.Tensor] | None = None
    selected: tuple[torch.Tensor, ...] | None = None
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0

    def of_request(self, request: int, rows: slice) -> OracleParams:
        """The parameters of one request with query tokens `rows`."""
        per_token = self.sinks is not None and self.sinks.dim() == 2
        return replace(
            self,
            causal=bool(self.causal[request])
            if isinstance(self.causal, torch.Tensor)
            else self.causal,
            query_bias=None if self.query_bias is None else self.query_bias[rows],
            sinks=self.sinks[rows] if self.sinks is not None and per_token else self.sinks,
            score=None if self.score is None else partial(self.score, request),
            selected=None if self.selected is None else (self.selected[request],),
        )


@dataclass(frozen=True)
class OracleResult:
    """The expected result.

    Attributes:
        out: [T, Hq, Dv] in `precision`; padding rows and rows that see no key are 0.
        lse: [T, Hq] float64, natural log; -inf for rows without a key and without a sink.
        weights: per request [Hq, query_len, seq_len], the softmax weights.
        visible: per request [query_len, seq_len] bool, the visible keys.
        sizes: [T, Hq] float64, the magnitudes that are rounded on the way to the LSE of a row; see
            `_rounded_sizes`.
        spread: [T, Hq, Dv] float64, with a soft cap: the soft cap times the standard deviation of
            the values under the weights of a row; None without.
    """

    out: torch.Tensor
    lse: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    visible: tuple[torch.Tensor, ...]
    sizes: torch.Tensor
    spread: torch.Tensor | None


def gather_tokens(cache: torch.Tensor, block_row: torch.Tensor, length: int) -> torch.Tensor:
    """Gather the first `length` tokens of one request from a paged view [B, N, H, D] (P1, P3).

    Returns:
        [length, H, D].
    """
    block_size = cache.shape[1]
    raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    blocks = [raw[block] for block in block_row[: -(-length // block_size)].tolist()]
    tokens = torch.cat(blocks)[:length] if blocks else raw.new_empty((0, *raw.shape[2:]))
    return tokens.contiguous().view(cache.dtype)


def visible_keys(
    query_positions: torch.Tensor, num_keys: int, params: OracleParams
) -> torch.Tensor:
    """The mask [len(query_positions), num_keys] bool; True where a key is visible (M1, M2)."""
    p = query_positions[:, None]
    k = torch.arange(num_keys, device=query_positions.device)[None, :]
    left, right = params.window
    chunk = params.attention_chunk_size
    visible = torch.ones(
        len(query_positions), num_keys, dtype=torch.bool, device=query_positions.device
    )
    if params.causal:
        visible &= k <= p
    if left >= 0:
        visible &= k >= p - left
    if right >= 0:
        visible &= k <= p + right
    if chunk > 0:
        visible &= torch.div(k, chunk, rounding_mode="floor") == torch.div(
            p, chunk, rounding_mode="floor"
        )
    return visible


def _dequantize(
    stored: torch.Tensor, scale: float | torch.Tensor, precision: torch.dtype
) -> torch.Tensor:
    per_head = torch.as_tensor(scale, dtype=torch.float64, device=stored.device).expand(
        stored.shape[1]
    )
    return stored.to(precision) * per_head.to(precision)[:, None]


def _per_kv_head(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply x [Hq, q, n] by the y [Hkv, n, m] of its KV head: [Hq, q, m]."""
    (heads, query_len, size), kv_heads = x.shape, y.shape[0]
    rows = x.reshape(kv_heads, heads // kv_heads * query_len, size)  # no copy of y per query head
    # A CPU accumulates products of float16 in float32 too, and takes up to 15 times as long.
    slow = x.dtype == torch.float16 and x.device.type == "cpu"
    product = (rows.float() @ y.float()).to(x.dtype) if slow else rows @ y
    return product.view(heads, query_len, y.shape[2])


def _logits(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, params: OracleParams
) -> torch.Tensor:
    """Logits before the mask, in the order of M3: [Hq, q, s] of q [Hq, q, D] and k [Hkv, s, D]."""
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32  # M8
    query_len, seq_len = q.shape[1], k.shape[1]
    logits = (params.scale * _per_kv_head(q, k.transpose(1, 2))).to(statistics)
    if params.logits_soft_cap > 0:
        logits = params.logits_soft_cap * torch.tanh(logits / params.logits_soft_cap)
    if params.alibi_slopes is not None:
        distance = (positions[:, None] - torch.arange(seq_len, device=q.device)[None, :]).abs()
        logits = logits - params.alibi_slopes.to(statistics)[:, None, None] * distance
    if params.query_bias is not None:
        for key in range(max(seq_len - query_len, 0), seq_len):
            logits[:, :, key] += params.query_bias[:, key - (seq_len - query_len)].to(statistics)
    if params.score is not None:
        heads = torch.arange(q.shape[0], device=q.device)[:, None, None]
        keys = torch.arange(seq_len, device=q.device)
        masked = logits == -math.inf  # by the bias: the function does not show these keys again
        logits = params.score(logits, positions[:, None], keys, heads).expand(logits.shape)
        logits = logits.to(statistics).masked_fill(masked, -math.inf)
    return logits


def _rounded_sizes(
    q: torch.Tensor,
    k: torch.Tensor,
    logits: torch.Tensor,
    weights: torch.Tensor,
    params: OracleParams,
) -> torch.Tensor:
    """Magnitudes that a computation of the LSE rounds, [Hq, q].

    To first order, the error of an LSE is the sum of the errors of the scores, times their weights.
    A score is a sum of products (its magnitude is at most |q| |k|), capped by a tanh with an error
    relative to 1, and a logit after biases; the sink is a logit too. The exponential of the largest
    score is exactly 1, and the others have the rest of the weight.
    """
    heads, kv_heads = q.shape[0], k.shape[0]
    key_norms = k.norm(dim=2).repeat_interleave(heads // kv_heads, dim=0)
    sizes: torch.Tensor = params.scale * q.norm(dim=2) * (weights @ key_norms[:, :, None])[:, :, 0]
    sizes = sizes + params.logits_soft_cap
    sizes = sizes + (weights * logits.nan_to_num(0.0, 0.0, 0.0).abs()).sum(dim=2)
    if weights.shape[2]:
        sizes = sizes + 1 - weights.amax(dim=2)
    if params.sinks is not None:
        sink = params.sinks.to(sizes.dtype).expand(q.shape[1], heads).T
        sizes = sizes + (1 - weights.sum(dim=2)) * sink.nan_to_num(0.0, 0.0, 0.0).abs()
    return sizes


def _spread(weights: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Standard deviation of the values under the weights, [Hq, q, Dv]."""
    return (_per_kv_head(weights, v * v) - out * out).clamp(min=0).sqrt()


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: OracleParams,
    precision: torch.dtype,
) -> OracleResult:
    """The result of one request: query [q, Hq, D], keys [s, Hkv, D], values [s, Hkv, Dv]."""
    query_len, num_heads, _ = query.shape
    seq_len = keys.shape[0]
    q = query.to(precision).transpose(0, 1)
    k = _dequantize(keys, params.k_scale, precision).transpose(0, 1)
    v = _dequantize(values, params.v_scale, precision).transpose(0, 1)
    positions = seq_len - query_len + torch.arange(query_len, device=query.device)  # M1

    logits = _logits(q, k, positions, params)
    visible = visible_keys(positions, seq_len, params)
    logits = logits.masked_fill(~visible, -math.inf)
    if params.selected is not None:  # M11
        logits = logits.masked_fill(~params.selected[0], -math.inf)
    denominator = logits
    if params.sinks is not None:  # M4; of query tokens M22
        sink = params.sinks.to(logits.dtype).expand(query_len, num_heads).T[:, :, None]
        denominator = torch.cat([logits, sink], dim=2)
    if denominator.shape[2]:
        lse = torch.logsumexp(denominator, dim=2)
    else:
        lse = logits.new_full((num_heads, query_len), -math.inf)
    weights = torch.exp(
        logits - lse.masked_fill(lse == -math.inf, 0.0)[:, :, None]
    )  # M5: no key, no sink: 0
    out = _per_kv_head(weights.to(precision), v)
    sizes = _rounded_sizes(q.to(weights.dtype), k.to(weights.dtype), logits, weights, params)
    spread = None
    if params.logits_soft_cap > 0 and precision == torch.float64:
        spread = params.logits_soft_cap * _spread(weights, v.to(weights.dtype), out)
        spread = spread.transpose(0, 1)
    return OracleResult(
        out.transpose(0, 1),
        lse.transpose(0, 1),
        (weights,),
        (visible,),
        sizes.transpose(0, 1),
        spread,
    )


def _joined(
    parts: list[OracleResult],
    starts: list[int],
    query: torch.Tensor,
    head_size_v: int,
    precision: torch.dtype,
) -> OracleResult:
    """The results of all requests; rows of no request are those of an empty row (M5, M6)."""
    shape = (*query.shape[:2], head_size_v)
    out = query.new_zeros(shape, dtype=precision)
    lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float64)
    sizes = query.new_zeros(query.shape[:2], dtype=torch.float64)
    spread = query.new_zeros(shape, dtype=torch.float64)
    for start, end, part in zip(starts, starts[1:], parts, strict=False):
        rows = slice(start, end)
        out[rows], lse[rows], sizes[rows] = part.out, part.lse, part.sizes
        if part.spread is not None:
            spread[rows] = part.spread
    return OracleResult(
        out,
        lse,
        tuple(part.weights[0] for part in parts),
        tuple(part.visible[0] for part in parts),
        sizes,
        spread if any(part.spread is not None for part in parts) else None,
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    params: OracleParams,
    precision: torch.dtype = torch.float64,
) -> OracleResult:
    """Attention over a paged cache.

    Args:
        query: [T, Hq, D], any strides.
        key_cache: [B, N, Hkv, D], any strides.
        value_cache: [B, N, Hkv, Dv], any strides.
        block_table: [R, M] int32.
        query_start_loc: [R+1] int32.
        seq_lens: [R] int32.
        params: the parameters of the computation.
        precision: dtype of the two matrix products; the softmax uses float32 or float64.
    """
    starts = query_start_loc.tolist()
    parts = []
    for request, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        keys = gather_tokens(key_cache, block_table[request], seq_len)
        values = gather_tokens(value_cache, block_table[request], seq_len)
        parts.append(
            _attend(query[rows], keys, values, params.of_request(request, rows), precision)
        )
    return _joined(parts, starts, query, value_cache.shape[3], precision)


def unpaged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    params: OracleParams,
    precision: torch.dtype = torch.float64,
) -> OracleResult:
    """Attention over keys and values that are not cached, as in encoders; bottom-right mask (M1).

    Args:
        query: [T, Hq, D].
        key: [Tk, Hkv, D].
        value: [Tk, Hkv, Dv].
        cu_seqlens_q: [R+1] int32, start of each request in `query`.
        cu_seqlens_k: [R+1] int32, start of each request in `key` and `value`.
        params: the parameters of the computation.
        precision: dtype of the two matrix products.
    """
    q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = []
    for request in range(len(q_starts) - 1):
        rows = slice(q_starts[request], q_starts[request + 1])
        keys = slice(k_starts[request], k_starts[request + 1])
        parts.append(
            _attend(
                query[rows], key[keys], value[keys], params.of_request(request, rows), precision
            )
        )
    return _joined(parts, q_starts, query, value.shape[2], precision)
