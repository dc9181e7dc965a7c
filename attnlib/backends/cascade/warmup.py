"""The batches with one shared prefix that a warm-up runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from attnlib.metadata.base import AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.shared_prefix import SharedPrefix
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["warmup_batch", "warmup_sizes"]


def warmup_sizes(
    limits: BatchLimits,
    prefix: AttentionMetadataBuilder[Any],
    suffix: AttentionMetadataBuilder[Any],
    one_kernel: bool,
) -> Iterator[tuple[int, int, int, int]]:
    """(Requests, query tokens of each, tokens of the prefix, own tokens of a request) of every
    class of query rows, of prefix lengths, and of suffix lengths.

    Args:
        limits: the largest batch.
        prefix, suffix: the builders of the two backends.
        one_kernel: whether one kernel computes decodes of one query token.
    """
    block = suffix.spec.block_size
    for count, query_len in _shapes(limits, suffix):
        longest = (limits.max_seq_len - query_len) // block * block
        if longest < block:
            continue
        if one_kernel and query_len == 1:
            yield count, 1, block, 1
            continue
        bounds = prefix.seq_len_bounds(1, block, longest)
        prefixes = sorted({min(longest, -(-bound // block) * block) for bound in bounds})
        sizes = [(prefix_len, query_len) for prefix_len in prefixes]
        owns = suffix.seq_len_bounds(count, query_len, limits.max_seq_len - block)
        sizes += [(block, own) for own in owns]
        for prefix_len, own in dict.fromkeys(sizes):
            yield count, query_len, prefix_len, own


def _shapes(limits: BatchLimits, suffix: AttentionMetadataBuilder[Any]) -> list[tuple[int, int]]:
    """(Requests, query tokens of each) of every class of query rows; arguments as above."""
    most = limits.max_num_tokens
    longest_decode = min(suffix.reorder_batch_threshold or 1, most // 2)
    powers = [1 << n for n in range(1, limits.max_num_reqs.bit_length())]
    counts = sorted({*powers, limits.max_num_reqs} - {1})
    shapes = [
        (count, query_len)
        for query_len in range(1, longest_decode + 1)
        for count in counts
        if count * query_len <= most
    ]
    if shapes and most // 2 > longest_decode:
        shapes.append((2, most // 2))
        further = [(max(2, len(x)), x[0]) for x in suffix.warmup_lengths(limits) if len({*x}) == 1]
        shapes += [shape for shape in further if math.prod(shape) <= most]
    return list(dict.fromkeys(shapes))


def warmup_batch(
    spec: AttentionSpec,
    device: torch.device,
    num_reqs: int,
    query_len: int,
    prefix_len: int,
    own: int,
) -> tuple[CommonAttentionMetadata, SharedPrefix]:
    """Requests with one prefix, whose tokens are all in block 0, and the prefix.

    Args:
        spec: of the layers.
        device: of the batch.
        num_reqs: R.
        query_len: query tokens of each request.
        prefix_len: tokens of the prefix.
        own: tokens of a request besides, as declared by the bound of the batch.
    """
    columns = -(-(prefix_len + own) // spec.block_size)
    common = CommonAttentionMetadata.from_lengths(
        [query_len] * num_reqs,
        [prefix_len + query_len] * num_reqs,
        torch.zeros(num_reqs, columns, dtype=torch.int32, device="cpu"),
        spec.block_size,
        device,
        max_seq_len=prefix_len + own,
    )
    assert common.slot_mapping is not None  # a block table was given
    common.slot_mapping.fill_(-1)
    return common, SharedPrefix(tuple(range(num_reqs)), 0, prefix_len)
