"""Slice a batch: keep some requests and some of their query tokens, over the same cache.

The batch-invariance check (D1) compares a slice with the whole batch. `attnlib replay --shrink`
uses slices to reduce a failing batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from attnlib.score_functions.query_tensors import QUERY_ROW
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.score_functions import oracle_score

__all__ = ["slice_batch"]


def slice_batch(
    step: MaterializedCase,
    requests: Sequence[int],
    query_spans: Sequence[tuple[int, int]] | None = None,
) -> MaterializedCase:
    """A smaller batch over the same cache.

    Args:
        step: the whole batch.
        requests: indices of the requests to keep, in the new order.
        query_spans: for each kept request, the range [start, stop) of query tokens to keep. The
            sequence ends with the last kept token. None keeps all tokens.
    """
    inputs, batch, device = step.inputs, step.inputs.batch, step.inputs.query.device
    first = [0, *accumulate(batch.query_lens)]
    spans = query_spans or [(0, batch.query_lens[r]) for r in requests]
    ends = ((batch.lengths[r], stop) for r, (_, stop) in zip(requests, spans, strict=True))
    seq_lens = tuple(seq_len - (query_len - stop) for (query_len, seq_len), stop in ends)
    rows = [
        row
        for r, (a, b) in zip(requests, spans, strict=True)
        for row in range(first[r] + a, first[r] + b)
    ]
    index = torch.tensor(rows, dtype=torch.long, device=device)
    smaller = BatchSpec(tuple(b - a for a, b in spans), seq_lens)
    starts = [0, *accumulate(smaller.query_lens)]
    chosen = torch.tensor(list(requests), dtype=torch.long, device=device)
    bias, sinks, causal = step.params.query_bias, step.params.sinks, step.params.causal
    score, score_tensors = None, None
    if step.spec.score_function is not None:
        score_tensors = _sliced_score_tensors(step, smaller, chosen, index)
        score = oracle_score(step.spec.score_function, score_tensors, device)
    return replace(
        step,
        case=step.case.replace(batch=str(smaller)),
        inputs=replace(
            inputs,
            batch=smaller,
            placement=replace(
                inputs.placement, blocks=tuple(inputs.placement.blocks[r] for r in requests)
            ),
            query=inputs.query[index],
            key=inputs.key[index],
            value=inputs.value[index],
            out=torch.full_like(inputs.out[index], float("nan")),
            block_table=inputs.block_table[chosen],
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(smaller.seq_lens, dtype=torch.int32, device=device),
            slot_mapping=inputs.slot_mapping[index],
        ),
        params=replace(
            step.params,
            query_bias=None if bias is None else bias[index],
            sinks=sinks[index] if sinks is not None and step.case.token_sinks else sinks,
            causal=causal[chosen] if isinstance(causal, torch.Tensor) else causal,
            score=score,
        ),
        given_score_tensors=score_tensors,
    )


def _sliced_score_tensors(
    step: MaterializedCase, smaller: BatchSpec, chosen: torch.Tensor, index: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The tensors of the score function for a slice.

    Args:
        step: the whole batch.
        smaller: the slice.
        chosen: indices of its requests in the whole batch.
        index: indices of its rows.
    """
    per_request = step.score_tensors("batch_tensors")
    sliced = {name: tensor[chosen] for name, tensor in per_request.items()}
    of_tokens = {name: x[index] for name, x in step.score_tensors("query_tensors").items()}
    if of_tokens:
        ends = zip(accumulate(smaller.query_lens), smaller.seq_lens, strict=True)
        rows_before = [[end - length] for end, length in ends]
        sliced[QUERY_ROW] = torch.tensor(rows_before, dtype=torch.int32, device=index.device)
    return {**step.score_tensors(), **of_tokens, **sliced}
