"""Metadata of a composite: the batch is split after its decodes, and each child builds its part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.batch_slice import slice_batch
from attnlib.metadata.checks import check_batch
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.split import leading_decodes
from attnlib.metadata.strides import refuse_strided
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["CompositeMetadata", "CompositeMetadataBuilder"]

BuildChild = Callable[[AttentionMetadataBuilder[Any], CommonAttentionMetadata], Any]


@dataclass(kw_only=True)
class CompositeMetadata(AttentionMetadata):
    """The children's metadata of one batch.

    Attributes:
        num_actual_tokens: T.
        num_decodes: leading requests that the decode child computes.
        query_start_loc: `[R + 1]` int32, of the whole batch, for validation and recording.
        seq_lens: `[R]` int32, of the whole batch.
        block_table: `[R, max_blocks]` int32, of the whole batch, or None.
        decode: the decode child's metadata, or None without decodes.
        prefill: the prefill child's metadata, or None without prefills.
    """

    fixed_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "num_actual_tokens",
            "num_decodes",
            "num_decode_tokens",
            "num_prefills",
            "num_prefill_tokens",
            "query_start_loc",
            "seq_lens",
            "block_table",
        }
    )

    num_actual_tokens: int
    num_decodes: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None
    decode: Any
    prefill: Any

    @property
    def prefill_metadata(self) -> Any:
        """The prefill child's metadata."""
        return self.prefill

    @property
    def decode_metadata(self) -> Any:
        """The decode child's metadata."""
        return self.decode


class CompositeMetadataBuilder(AttentionMetadataBuilder[CompositeMetadata]):
    """Splits each batch and lets the children build their parts.

    `make_composite` creates a subclass for each pair of backends.
    """

    prefill_backend: ClassVar[type[AttentionBackend]]
    decode_backend: ClassVar[type[AttentionBackend]]

    def __init__(
        self, spec: AttentionSpec, device: torch.device | str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(spec, device, **kwargs)
        kwargs.pop("config", None)
        self._prefill = self.prefill_backend.make_builder(spec, device, **kwargs)
        self._decode = self.decode_backend.make_builder(spec, device, **kwargs)
        self._threshold = self._decode.reorder_batch_threshold or 1

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """See `AttentionMetadataBuilder.reorder_batch`; the decode child decides."""
        return self._decode.reorder_batch(input_batch, scheduler_output)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CompositeMetadata:
        """The metadata of both children; a part without requests is not built."""
        return self._build(
            common_attn_metadata,
            lambda builder, part: builder.build(common_prefix_len, part, fast_build),
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> CompositeMetadata:
        """The metadata of both children, each from its `build_for_cudagraph_capture`.

        Raises:
            ContractError: the batch has strided metadata.
        """
        refuse_strided(common_attn_metadata)
        return self._build(
            common_attn_metadata, lambda builder, part: builder.build_for_cudagraph_capture(part)
        )

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> CompositeMetadata:
        """The metadata of both children, each from its `build_for_drafting`."""
        return self._build(
            common_attn_metadata,
            lambda builder, part: builder.build_for_drafting(part, draft_index),
        )

    def seq_len_bounds(self, num_reqs: int, least: int, most: int) -> list[int]:
        """The bounds of both children."""
        return sorted(
            {
                bound
                for builder in (self._prefill, self._decode)
                for bound in builder.seq_len_bounds(num_reqs, least, most)
            }
        )

    def warmup_lengths(self, limits: BatchLimits) -> list[tuple[int, ...]]:
        """The batches of both children."""
        return [*self._prefill.warmup_lengths(limits), *self._decode.warmup_lengths(limits)]

    def update_block_table(
        self, metadata: CompositeMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CompositeMetadata:
        """The same batch with other blocks, for both children."""
        updated = super().update_block_table(metadata, block_table, slot_mapping)
        requests, tokens = metadata.num_decodes, metadata.num_decode_tokens
        if metadata.decode is not None:
            decodes = (block_table, slot_mapping)  # without prefills all of it, padding included
            if metadata.prefill is not None:
                decodes = (block_table[:requests], slot_mapping[:tokens])
            updated.decode = self._decode.update_block_table(metadata.decode, *decodes)
        if metadata.prefill is not None:
            updated.prefill = self._prefill.update_block_table(
                metadata.prefill, block_table[requests:], slot_mapping[tokens:]
            )
        return updated

    def _build(self, common: CommonAttentionMetadata, build: BuildChild) -> CompositeMetadata:
        # The children check their parts; parts of a wrong batch could look right.
        check_batch(common, self.spec, needs_host_lengths=self.needs_host_lengths)
        decodes, tokens = leading_decodes(common, self._threshold)
        if tokens == 0:
            decodes = 0  # only padding, or lengths unknown to the host: all of it is a prefill
        decode = prefill = None
        if decodes and decodes == common.num_reqs:
            decode = build(self._decode, common)
        elif decodes == 0:
            prefill = build(self._prefill, common)
        else:
            decode = build(self._decode, common.unpadded(decodes, tokens))
            prefill = build(self._prefill, _remainder(common, decodes, tokens))
        return CompositeMetadata(
            num_prefills=common.num_reqs - decodes,
            num_prefill_tokens=common.num_actual_tokens - tokens,
            num_decode_tokens=tokens,
            slot_mapping=None if common.slot_mapping is None else common.slot_mapping.contiguous(),
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=decodes,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            decode=decode,
            prefill=prefill,
        )


def _remainder(
    common: CommonAttentionMetadata, num_reqs: int, num_tokens: int
) -> CommonAttentionMetadata:
    """The requests after the first `num_reqs`, as a separate batch."""
    tokens = slice(num_tokens, common.num_actual_tokens)
    return slice_batch(common, slice(num_reqs, common.num_reqs), tokens, tokens)
