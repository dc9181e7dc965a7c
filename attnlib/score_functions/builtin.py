"""Score functions of common models and batches.

| function | changes | mask kind of the layer | tensors |
|---|---|---|---|
| `prefix_lm` | prompts are bidirectional, the rest is causal | bidirectional | prefix_len |
| `bidirectional_spans` | tokens of an image see each other | bidirectional | span_begin, span_end |
| `documents` | packed documents do not see each other | causal or not | document_begin, _end |
| `multi_item` | items see the shared prompt and themselves | causal | prefix_len, item_begin |
| `block_diffusion` | blocks are bidirectional, causal between blocks | bidirectional | |
| `head_windows` | every head has its own window | causal | window |
| `relative_bias` | T5: a bias by head and distance | any | bias |
| `alibi_sqrt` | ALiBi with the root of the distance | any | slope |

The functions of one row of the table are equal for equal arguments, so layers share their plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlib.score_functions.function import ScoreFunction
from attnlib.score_functions.operators import lookup, maximum, minimum, sqrt, where

__all__ = [
    "alibi_sqrt", "bidirectional_spans", "block_diffusion", "document_tensors", "documents",
    "head_windows", "multi_item", "prefix_lm", "relative_bias", "span_tensors",
    "t5_relative_bias",
]  # fmt: skip


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
    return {"prefix_len": _column([length // 2 for length in seq_lens])}


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
    begin = torch.zeros(len(spans), max(length, 1), dtype=torch.int32)
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


def documents(causal: bool = True, longest: int = 1 << 30) -> ScoreFunction:
    """Documents packed in one request: a query sees the keys of its own document only.

    Batch tensor `document_begin` `[R, positions]`, without `causal` also `document_end`
    (`document_tensors`): for each position the first position of its document, and the one after
    the last.

    Args:
        causal: the layer is causal, so that the ends are not needed.
        longest: no document has more tokens. Prefills on Hopper choose their tiles by it: without
            it, documents are taken for short ones.
    """
    return ScoreFunction(
        _causal_documents if causal else _documents,
        constants=(("longest", longest),),
        batch_tensors=("document_begin",) if causal else ("document_begin", "document_end"),
        bounds=_causal_documents_bounds if causal else _documents_bounds,
        exact_bounds=True,
        examples=_document_examples,
    )


def _causal_documents(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return where(k_pos >= lookup(aux.document_begin, request, q_pos), score, float("-inf"))


def _first_of_document(q_pos: Any, request: Any, aux: Any) -> Any:
    return maximum(lookup(aux.document_begin, request, q_pos), q_pos - aux.longest + 1)


def _causal_documents_bounds(
    q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any
) -> Any:
    first = _first_of_document(q_first, request, aux)
    return first, seq_len, _first_of_document(q_last, request, aux), seq_len


def _documents(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    after = k_pos >= lookup(aux.document_begin, request, q_pos)
    before = k_pos < lookup(aux.document_end, request, q_pos)
    return where(after & before, score, float("-inf"))


def _documents_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    first = _first_of_document(q_first, request, aux)
    last = lookup(aux.document_end, request, q_last)
    same_first = _first_of_document(q_last, request, aux)
    return first, last, same_first, lookup(aux.document_end, request, q_first)


def document_tensors(lengths: Sequence[Sequence[int]], length: int) -> dict[str, Tensor]:
    """The batch tensors of `documents`, on the CPU.

    Args:
        lengths: for each request the numbers of tokens of its documents, in order. Tokens after
            them belong to the last document.
        length: columns of the tensors.
    """
    begin = torch.zeros(len(lengths), max(length, 1), dtype=torch.int32)
    end = torch.full_like(begin, length)
    for request, sizes in enumerate(lengths):
        first = 0
        for number, size in enumerate(sizes):
            last = length if number == len(sizes) - 1 else first + size
            begin[request, first:last], end[request, first:last] = first, last
            first = last
    return {"document_begin": begin, "document_end": end}


def _document_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    lengths = [[7 + request % 3] * (n // 7 + 1) for request, n in enumerate(seq_lens)]
    return document_tensors(lengths, max(seq_lens, default=1))


def multi_item() -> ScoreFunction:
    """Several items behind one shared prompt, scored in one request: an item sees the prompt and
    its own tokens up to the query.

    Batch tensors: `prefix_len` `[R, 1]`, tokens of the prompt; `item_begin` `[R, positions]`, for
    each position the first position of its item, 0 in the prompt. The layer is causal.
    """
    return ScoreFunction(
        _multi_item,
        batch_tensors=("prefix_len", "item_begin"),
        bounds=_multi_item_bounds,
        examples=_multi_item_examples,
    )


def _multi_item(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    own = k_pos >= lookup(aux.item_begin, request, q_pos)
    shared = k_pos < lookup(aux.prefix_len, request, 0)
    return where(own | shared, score, float("-inf"))


def _multi_item_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    prefix = lookup(aux.prefix_len, request, 0)
    item = lookup(aux.item_begin, request, q_first)
    same_item = lookup(aux.item_begin, request, q_last)
    return 0, prefix, 0, prefix, item, seq_len, same_item, seq_len


def _multi_item_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    prefixes = [length // 3 for length in seq_lens]
    items = torch.zeros(len(prefixes), max(seq_lens, default=1), dtype=torch.int32)
    for request, prefix in enumerate(prefixes):
        for begin in range(prefix, items.shape[1], 5):
            items[request, begin : begin + 5] = begin
    return {"prefix_len": _column(prefixes), "item_begin": items}


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


def head_windows(smallest: int = 1, largest: int = 1 << 30) -> ScoreFunction:
    """A window for each head. Layer tensor `window` `[Hq]` int32: visible keys, including the
    query's own. The layer is causal.

    Args:
        smallest, largest: bounds of the windows, which limit the keys that decodes read.
    """
    return ScoreFunction(
        _head_windows,
        constants=(("smallest", smallest), ("largest", largest)),
        layer_tensors=("window",),
        bounds=_head_windows_bounds,
        head_bounds=_one_window_bounds,
        exact_bounds=True,
        examples=_head_window_examples,
    )


def _head_windows(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return where(q_pos - k_pos < lookup(aux.window, head), score, float("-inf"))


def _head_windows_bounds(q_first: Any, q_last: Any, seq_len: Any, request: Any, aux: Any) -> Any:
    return q_first - aux.largest + 1, seq_len, q_last - aux.smallest + 1, seq_len


def _one_window_bounds(
    q_first: Any, q_last: Any, seq_len: Any, head: Any, request: Any, aux: Any
) -> Any:
    window = lookup(aux.window, head)
    return q_first - window + 1, seq_len, q_last - window + 1, seq_len


def _head_window_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    return {"window": torch.tensor([1 + 5 * head for head in range(num_heads)], dtype=torch.int32)}


def relative_bias(max_distance: int = 128) -> ScoreFunction:
    """A bias by head and distance, as in T5. Layer tensor `bias` `[Hq, 2 * max_distance + 1]`:
    column `max_distance + d` is the bias of a key d positions before the query; larger distances
    use the columns at the edges. `t5_relative_bias` makes it from the weights of a model.

    Args:
        max_distance: largest distance with a bias of its own.
    """
    return ScoreFunction(
        _relative_bias,
        constants=(("max_distance", max_distance),),
        layer_tensors=("bias",),
        examples=_relative_bias_examples,
    )


def _relative_bias(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score + lookup(aux.bias, head, q_pos - k_pos + aux.max_distance)


def _relative_bias_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    columns = torch.arange(257.0)
    heads = torch.arange(1.0, num_heads + 1)[:, None]
    return {"bias": torch.sin(columns * 0.3 * heads) * 2.0}


def t5_relative_bias(
    weight: Tensor, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> Tensor:
    """The tensor `bias` `[Hq, 2 * max_distance + 1]` of `relative_bias` for a T5 model.

    Args:
        weight: `[num_buckets, Hq]`, the embedding of the relative position buckets.
        bidirectional: for an encoder: later keys have buckets of their own.
        num_buckets: `relative_attention_num_buckets` of the model.
        max_distance: `relative_attention_max_distance` of the model.
    """
    later = -torch.arange(-max_distance, max_distance + 1, device=weight.device)  # k - q
    buckets = torch.zeros_like(later)
    if bidirectional:
        num_buckets //= 2
        buckets = torch.where(later > 0, num_buckets, 0)
        distance = later.abs()
    else:
        distance = (-later).clamp(min=0)
    exact = num_buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    large = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    buckets = buckets + torch.where(distance < exact, distance, large)
    return weight[buckets].T.contiguous()


def alibi_sqrt() -> ScoreFunction:
    """ALiBi with the square root of the distance. Layer tensor `slope` `[Hq]` float32."""
    return ScoreFunction(_alibi_sqrt, layer_tensors=("slope",), examples=_slope_examples)


def _alibi_sqrt(score: Any, q_pos: Any, k_pos: Any, head: Any, request: Any, aux: Any) -> Any:
    return score - lookup(aux.slope, head) * sqrt(abs(q_pos - k_pos))


def _slope_examples(num_heads: int, seq_lens: Sequence[int]) -> dict[str, Tensor]:
    heads = torch.arange(1, num_heads + 1)
    return {"slope": 2.0 ** (-8.0 * heads / num_heads)}


def _column(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).reshape(-1, 1)
