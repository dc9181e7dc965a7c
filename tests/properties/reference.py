"""Attention in float64, written from docs/semantics.md and docs/paged-cache.md alone.

It imports nothing from attnlib, neither the torch operations nor the oracle of the conformance
suite. One request and one query head at a time: positions, mask, scores, softmax, weighted values.
`rounding.py` derives from the same numbers how far a correct result may be away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["Mask", "Parameters", "HeadResult", "attend_one_head", "positions_of", "visible_keys"]

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query sees.

    Attributes:
        causal: only keys up to the query's own position.
        left, right: number of visible keys before and after the query's own (M2); None for all.
        chunk: only keys of the same chunk of this many positions; None for all.
    """

    causal: bool
    left: int | None = None
    right: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The values of one query head.

    Attributes:
        scale: factor of q . k.
        soft_cap: c of c * tanh(score / c), or None.
        slope: ALiBi slope, or None.
        sink: logit without a value (M4), or None.
    """

    scale: float
    soft_cap: float | None = None
    slope: float | None = None
    sink: float | None = None


@dataclass(frozen=True)
class HeadResult:
    """The result of one query head of one request, in float64.

    Attributes:
        out: [query_len, Dv].
        lse: [query_len].
        weights: [query_len, seq_len]; 0 where a key is not visible.
        products: [query_len, seq_len]; |scale| * sum of |q_d * k_d|.
        scores: [query_len, seq_len]; before the mask.
        added: [query_len, seq_len]; |ALiBi term| + |finite bias|.
        sink_weight: [query_len].
    """

    out: Array
    lse: Array
    weights: Array
    products: Array
    scores: Array
    added: Array
    sink_weight: Array


def positions_of(query_len: int, seq_len: int) -> list[int]:
    """M1: query i of a request is at position seq_len - query_len + i."""
    return [seq_len - query_len + i for i in range(query_len)]


def visible_keys(positions: list[int], seq_len: int, mask: Mask) -> Array:
    """[query_len, seq_len] bool (M1, M2 and the table of masks)."""
    visible = np.ones((len(positions), seq_len), dtype=bool)
    keys = np.arange(seq_len)
    for row, p in enumerate(positions):
        if mask.causal:
            visible[row] &= keys <= p
        if mask.left is not None:
            visible[row] &= keys >= p - mask.left
        if mask.right is not None:
            visible[row] &= keys <= p + mask.right
        if mask.chunk is not None:
            visible[row] &= keys // mask.chunk == math.floor(p / mask.chunk)
    return visible


def attend_one_head(
    query: Array,
    keys: Array,
    values: Array,
    visible: Array,
    positions: list[int],
    parameters: Parameters,
    bias: Array | None,
) -> HeadResult:
    """One query head of one request (M3, M4, M5).

    Args:
        query: [query_len, D].
        keys, values: [seq_len, D] and [seq_len, Dv].
        visible: [query_len, seq_len] bool.
        positions: of the queries.
        parameters: of the head.
        bias: [query_len, >= query_len]; column j is added to the score of the j-th new token.
    """
    query_len, seq_len = visible.shape
    scores = parameters.scale * (query @ keys.T)
    products = abs(parameters.scale) * (np.abs(query) @ np.abs(keys).T)
    if parameters.soft_cap is not None:
        scores = parameters.soft_cap * np.tanh(scores / parameters.soft_cap)
    added = np.zeros_like(scores)
    if parameters.slope is not None:
        distance = np.abs(np.array(positions).reshape(-1, 1) - np.arange(seq_len).reshape(1, -1))
        scores = scores - parameters.slope * distance
        added += abs(parameters.slope) * distance
    if bias is not None:
        scores = scores.copy()
        for j in range(query_len):
            key = seq_len - query_len + j
            if key < 0:
                continue
            scores[:, key] += bias[:, j]
            added[:, key] += np.where(np.isfinite(bias[:, j]), np.abs(bias[:, j]), 0.0)
    masked = np.where(visible, scores, -math.inf)
    sink = -math.inf if parameters.sink is None else parameters.sink
    largest = np.maximum(masked.max(axis=1, initial=-math.inf), sink)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore"):
        exponentials = np.exp(masked - shift[:, None])
        sink_term = np.exp(sink - shift)
        denominator = exponentials.sum(axis=1) + sink_term
        lse = np.log(denominator) + shift
    divisor = np.where(denominator > 0, denominator, 1.0)
    weights = exponentials / divisor[:, None]
    return HeadResult(
        out=weights @ values,
        lse=lse,
        weights=weights,
        products=products,
        scores=scores,
        added=added,
        sink_weight=sink_term / divisor,
    )
