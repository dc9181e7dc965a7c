"""Metadata of a cascade: prefixes that several requests share, and the rest of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnlib.backends.cascade.batches import PrefixBatch
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.shared_prefix import (
    SharedPrefix,
)
from attnlib.ops.shared_decode import DecodeItems
from attnlib.spec import AttentionSpec, MaskKind

__all__ = ["CascadeMetadata", "covered_tokens", "prefix_spec"]


@dataclass(kw_only=True)
class CascadeMetadata(AttentionMetadata):
    """One batch, whose shared prefixes are computed once.

    Attributes:
        num_actual_tokens: T.
        query_start_loc: `[R + 1]` int32 device, of the whole batch, for validation and recording.
        seq_lens: `[R]` int32 device, of the whole batch.
        block_table: `[R, max_blocks]` int32 device, of the whole batch, or None.
        shared_prefixes: the prefixes that are computed once; empty if there are none.
        suffix: the suffix backend's metadata: of each request without its shared prefixes; with
            `items` of whole requests, for tensors that the kernel of the items cannot read.
        prefix: the shared prefixes, or None if there are none.
        items: prefixes and suffixes as items of one kernel, or None.
    """

    fixed_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "num_actual_tokens",
            "num_decode_tokens",
            "num_prefills",
            "num_prefill_tokens",
            "query_start_loc",
            "seq_lens",
            "block_table",
            "shared_prefixes",
        }
    )

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    shared_prefixes: tuple[SharedPrefix, ...]
    suffix: Any
    prefix: PrefixBatch | None
    items: DecodeItems | None = None

    @classmethod
    def of(
        cls,
        common: CommonAttentionMetadata,
        suffix: Any,
        chosen: tuple[SharedPrefix, ...] = (),
        prefix: PrefixBatch | None = None,
        items: DecodeItems | None = None,
    ) -> CascadeMetadata:
        """The metadata of a batch.

        Args:
            common: the batch.
            suffix: the suffix backend's metadata.
            chosen: the prefixes that are computed once.
            prefix: these as a batch of the prefix backend, or None.
            items: prefixes and suffixes as items of one kernel, or None.
        """
        return cls(
            num_prefills=suffix.num_prefills,
            num_prefill_tokens=suffix.num_prefill_tokens,
            num_decode_tokens=suffix.num_decode_tokens,
            slot_mapping=None if common.slot_mapping is None else common.slot_mapping.contiguous(),
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            shared_prefixes=chosen,
            suffix=suffix,
            prefix=prefix,
            items=items,
        )


def prefix_spec(spec: AttentionSpec) -> AttentionSpec:
    """The requirements on the prefix backend: every key of a prefix is visible to every query, and
    the sink belongs to the suffix."""
    return spec.replace(mask_kind=MaskKind.BIDIRECTIONAL, has_sink=False)


def covered_tokens(prefixes: Sequence[SharedPrefix], num_reqs: int) -> list[int]:
    """Leading tokens of each request that its prefixes cover; a prefix follows the one that it
    continues."""
    covered = [0] * num_reqs
    for prefix in prefixes:
        for request in prefix.requests:
            covered[request] = prefix.end
    return covered
