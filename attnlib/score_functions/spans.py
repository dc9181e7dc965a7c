"""Prefixes, spans and blocks of keys that see each other in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlib.score_functions.batch_tensors import column
from attnlib.score_functions.function import ScoreFunction
from attnlib.score_functions.operators import lookup, maximum, minimum, where

__all__ = [
    "bidirectional_spans",
    "block_diffusion",
    "prefix_lm",
    "retained_window",
    "span_tensors",
]


def prefix_lm() -> ScoreFunction:
    """Prefix language models: the tokens of a prompt see each other, all others are causal.

    Batch tensor `prefix_len` `[R, 1]`: number of tokens of the prompt. The layer has
    `mask_kind="bidirectional"`.
    """
    return ScoreFunction(
        _prefix_lm,
        batch_tensors=("prefix_len",),
        bounds=_prefix_lm_bounds,
        exact_bounds=True,
        examples=_prefix_examples,
        needs_bidirectional=True,
    )


def _prefix_lm(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    end = maximum(q_pos + 1, lookup(aux.prefix_len, request, 0))
    return where(k_pos < end, score, float("-inf"))


def _prefix_lm_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    prefix = lookup(aux.prefix_len, request, 0)
    return 0, maximum(q_last + 1, prefix), 0, maximum(q_first + 1, prefix)


def _prefix_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    return {"prefix_len": column([length // 2 for length in seq_lens])}


def bidirectional_spans(window: int | None = None) -> ScoreFunction:
    """Causal attention in which the tokens of a span see the whole span: images of Gemma 3.

    Batch tensors `span_begin` and `span_end` `[R, positions]` (`span_tensors`): for each position
    the first position of its span, and the one after the last; 0 outside of spans. Spans do not
    overlap. The layer has `mask_kind="bidirectional"`.

    Args:
        window: number of visible keys, including the query's own, outside of the query's span; None
            for all. The layer itself has no window.
    """
    if window is None:
        return ScoreFunction(
            _spans,
            batch_tensors=("span_end",),
            bounds=_spans_bounds,
            exact_bounds=True,
            examples=_span_examples,
            needs_bidirectional=True,
        )
    return ScoreFunction(
        _windowed_spans,
        constants=(("window", window),),
        batch_tensors=("span_begin", "span_end"),
        bounds=_windowed_spans_bounds,
        exact_bounds=True,
        examples=_span_examples,
        needs_bidirectional=True,
    )


def _spans(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    end = maximum(q_pos + 1, lookup(aux.span_end, request, q_pos))
    return where(k_pos < end, score, float("-inf"))


def _spans_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    last = maximum(q_last + 1, lookup(aux.span_end, request, q_last))
    return 0, last, 0, maximum(q_first + 1, lookup(aux.span_end, request, q_first))


def _first_of_window(q_pos: Any, request: Any, aux: Any) -> Any:
    first = q_pos - aux.window + 1
    begin = minimum(first, lookup(aux.span_begin, request, q_pos))
    return where(q_pos < lookup(aux.span_end, request, q_pos), begin, first)


def _windowed_spans(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    end = maximum(q_pos + 1, lookup(aux.span_end, request, q_pos))
    visible = (k_pos < end) & (k_pos >= _first_of_window(q_pos, request, aux))
    return where(visible, score, float("-inf"))


def _windowed_spans_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    last = maximum(q_last + 1, lookup(aux.span_end, request, q_last))
    same_last = maximum(q_first + 1, lookup(aux.span_end, request, q_first))
    first = _first_of_window(q_first, request, aux)
    return first, last, _first_of_window(q_last, request, aux), same_last


def span_tensors(spans: Sequence[Sequence[tuple[int, int]]], length: int) -> dict[str, Tensor]:
    """The batch tensors of `bidirectional_spans`, on the CPU.

    Args:
        spans: for each request its spans as (first position, position after the last).
        length: columns of the tensors. Positions past it are outside of spans.
    """
    begin = torch.zeros(len(spans), max(length, 1), dtype=torch.int32, device="cpu")
    end = torch.zeros_like(begin)
    for request, intervals in enumerate(spans):
        for first, last in intervals:
            begin[request, first:last], end[request, first:last] = first, last
    return {"span_begin": begin, "span_end": end}


def _span_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    spans = [
        [(begin, min(begin + 5, length)) for begin in range(request % 3, length, 11)]
        for request, length in enumerate(seq_lens)
    ]
    return span_tensors(spans, max(seq_lens, default=1))


def retained_window(window: int) -> ScoreFunction:
    """Retained prompts (R-SWA): a query sees all keys of the prompt, and the last `window` keys.

    Batch tensor `prefix_len` `[R, 1]`: number of tokens of the prompt. The layer is causal and has
    no window.

    Args:
        window: number of visible keys behind the prompt, including the query's own.
    """
    return ScoreFunction(
        _retained,
        constants=(("window", window),),
        batch_tensors=("prefix_len",),
        bounds=_retained_bounds,
        examples=_retained_examples,
    )


def _retained(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    visible = (k_pos < lookup(aux.prefix_len, request, 0)) | (q_pos - k_pos < aux.window)
    return where(visible, score, float("-inf"))


def _retained_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    prefix = lookup(aux.prefix_len, request, 0)
    first, same_first = maximum(q_first - aux.window + 1, 0), maximum(q_last - aux.window + 1, 0)
    return 0, prefix, 0, prefix, first, seq_len, same_first, seq_len


def _retained_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    return {"prefix_len": column([length // 3 for length in seq_lens])}


def block_diffusion(block_size: int = 32) -> ScoreFunction:
    """Block diffusion: the tokens of a block see each other and all earlier blocks.

    The layer has `mask_kind="bidirectional"`.

    Args:
        block_size: tokens per block, counted from the start of the request.
    """
    return ScoreFunction(
        _block_diffusion,
        constants=(("block_size", block_size),),
        bounds=_block_diffusion_bounds,
        exact_bounds=True,
        needs_bidirectional=True,
    )


def _block_diffusion(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    end = (q_pos // aux.block_size + 1) * aux.block_size
    return where(k_pos < end, score, float("-inf"))


def _block_diffusion_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    last = (q_last // aux.block_size + 1) * aux.block_size
    return 0, last, 0, (q_first // aux.block_size + 1) * aux.block_size
