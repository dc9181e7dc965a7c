"""A range of the requests of a batch, as a batch of its own over views of the same tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnlib.metadata.shared_prefix import prefixes_of_requests

if TYPE_CHECKING:
    from attnlib.metadata.common import CommonAttentionMetadata

__all__ = ["rows_of", "slice_batch"]


def rows_of(
    tensors: Mapping[str, torch.Tensor] | None, requests: slice
) -> dict[str, torch.Tensor] | None:
    """The rows of some requests of the batch tensors of a score function."""
    return None if tensors is None else {name: rows[requests] for name, rows in tensors.items()}


def slice_batch(
    common: CommonAttentionMetadata, requests: slice, tokens: slice, slots: slice
) -> CommonAttentionMetadata:
    """Consecutive requests of a batch. Upper bounds stay those of the batch.

    Nothing is copied, except `query_start_loc` where the slice does not begin with the first
    request.

    Args:
        common: the batch.
        requests: `[first, end)` requests.
        tokens: `[first, end)` tokens of these requests.
        slots: `[first, end)` entries of `slot_mapping`.
    """

    def starts(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        part = tensor[requests.start : requests.stop + 1]
        return part - tokens.start if requests.start else part

    def part(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
        return None if tensor is None else tensor[rows]

    on_device = starts(common.query_start_loc)
    assert on_device is not None
    return replace(
        common,
        query_start_loc=on_device,
        query_start_loc_cpu=starts(common.query_start_loc_cpu),
        seq_lens=common.seq_lens[requests],
        seq_lens_cpu=part(common.seq_lens_cpu, requests),
        num_computed_tokens_cpu=part(common.num_computed_tokens_cpu, requests),
        num_reqs=requests.stop - requests.start,
        num_actual_tokens=tokens.stop - tokens.start,
        block_table_tensor=part(common.block_table_tensor, requests),
        slot_mapping=part(common.slot_mapping, slots),
        causal=common.causal[requests]
        if isinstance(common.causal, torch.Tensor)
        else common.causal,
        query_bias=part(common.query_bias, tokens),
        state_slots=part(common.state_slots, requests),
        state_sources=part(common.state_sources, requests),
        score_tensors=rows_of(common.score_tensors, requests),
        shared_prefixes=prefixes_of_requests(common.shared_prefixes, requests.start, requests.stop),
    )
