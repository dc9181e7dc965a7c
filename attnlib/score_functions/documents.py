"""Several documents, or items behind a shared prefix, in one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlib.score_functions.batch_tensors import column
from attnlib.score_functions.function import ScoreFunction
from attnlib.score_functions.operators import lookup, maximum, where

__all__ = ["document_tensors", "documents", "multi_item"]


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
    begin = torch.zeros(len(lengths), max(length, 1), dtype=torch.int32, device="cpu")
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
    items = column(prefixes).new_zeros(len(prefixes), max(seq_lens, default=1))
    for request, prefix in enumerate(prefixes):
        for begin in range(prefix, items.shape[1], 5):
            items[request, begin : begin + 5] = begin
    return {"prefix_len": column(prefixes), "item_begin": items}
