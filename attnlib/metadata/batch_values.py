"""The values of a batch on the host, from the batch or from the metadata of a backend."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnlib.metadata.batch_metadata import AttentionMetadata
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.facts import BatchFacts

__all__ = ["BatchValues"]


class BatchValues(NamedTuple):
    """The values of a batch on the host. A field that the source does not have is None, and its
    checks are skipped.

    Attributes:
        starts, seq_lens: of the device.
        starts_cpu, seq_lens_cpu, computed_cpu: the host's copies, and the context lengths.
        num_tokens, max_query_len, max_seq_len: as in `CommonAttentionMetadata`.
        table: rows of block ids.
        slots: slots of the new tokens; in cross-attention, of the new keys.
        query_bias: on the CPU.
        block_size: N.
        num_blocks: B; None before a cache is known.
        exact: lengths on the host equal those on the device; otherwise they may be all 0, or upper
            bounds of the sequence lengths.
        is_cross: sequences need not contain the queries.
    """

    starts: list[int]
    seq_lens: list[int]
    starts_cpu: list[int] | None
    seq_lens_cpu: list[int] | None
    computed_cpu: list[int] | None
    num_tokens: int | None
    max_query_len: int | None
    max_seq_len: int | None
    table: list[list[int]] | None
    slots: list[int] | None
    query_bias: torch.Tensor | None
    block_size: int
    num_blocks: int | None
    exact: bool
    is_cross: bool

    @classmethod
    def of_batch(cls, common: CommonAttentionMetadata, block_size: int, exact: bool) -> BatchValues:
        """The values of a batch. Synchronizes."""
        table, slots = common.block_table_tensor, common.slot_mapping
        values = cls._of(common, table, slots, block_size, exact)
        return values._replace(computed_cpu=_numbers(common.num_computed_tokens_cpu))

    @classmethod
    def of_metadata(
        cls,
        metadata: AttentionMetadata,
        block_size: int,
        num_blocks: int | None,
        exact: bool,
    ) -> BatchValues | None:
        """The values of a backend's metadata; None if it stores lengths in another form.
        Synchronizes."""
        facts, slots = metadata.facts, metadata.slot_mapping
        if facts.query_start_loc is None or facts.seq_lens is None:
            return None
        values = cls._of(facts, facts.block_table, slots, block_size, exact)
        if metadata.is_captured:  # the buffers of a graph hold another batch than at its capture
            values = values._replace(starts_cpu=None, seq_lens_cpu=None)
        return values._replace(num_blocks=num_blocks)

    @classmethod
    def _of(
        cls,
        source: CommonAttentionMetadata | BatchFacts,
        table: torch.Tensor | None,
        slots: torch.Tensor | None,
        block_size: int,
        exact: bool,
    ) -> BatchValues:
        bias = source.query_bias
        return cls(
            starts=_numbers(source.query_start_loc) or [],
            seq_lens=_numbers(source.seq_lens) or [],
            starts_cpu=_numbers(source.query_start_loc_cpu),
            seq_lens_cpu=_numbers(source.seq_lens_cpu),
            computed_cpu=None,
            num_tokens=source.num_actual_tokens,
            max_query_len=source.max_query_len,
            max_seq_len=source.max_seq_len,
            table=None if table is None else table.tolist(),
            slots=_numbers(slots),
            query_bias=None if bias is None else bias.detach().cpu(),
            block_size=block_size,
            num_blocks=None,
            exact=exact,
            is_cross=source.is_cross_attention,
        )

    @property
    def query_lens(self) -> list[int]:
        """New tokens of each request."""
        return [end - start for start, end in zip(self.starts, self.starts[1:], strict=False)]


def _numbers(tensor: torch.Tensor | None) -> list[int] | None:
    if tensor is None:
        return None
    numbers: list[int] = tensor.tolist()
    return numbers
