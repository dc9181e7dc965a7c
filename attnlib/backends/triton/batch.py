"""The tensors of a batch as the launches read them: those of its decode part and prefill part."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.backends.triton.metadata import TritonMetadata
from attnlib.metadata.paged import PartTensors
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.launch.signature import batch_signature, length_class

__all__ = ["Batch"]


class Batch(NamedTuple):
    """The tensors of a batch.

    Attributes:
        decodes: of the decode part; None for an empty part.
        prefills: of the prefill part, likewise.
        slots: `[T]` int64, the slots of the new keys; None where nothing is written.
    """

    decodes: BatchTensors | None
    prefills: BatchTensors | None
    slots: Tensor | None

    @classmethod
    def of(cls, metadata: TritonMetadata) -> Batch:
        """The tensors of a batch; an empty batch is one prefill."""
        slots, decode_len = metadata.slot_mapping, metadata.max_decode_query_len
        if metadata.num_prefills == 0 and metadata.num_decodes:
            return cls(_tensors_of(metadata, metadata, decode_len), None, slots)
        if metadata.num_decodes == 0:
            return cls(None, _tensors_of(metadata, metadata, metadata.max_query_len), slots)
        decode, prefill = (metadata.part_tensors(is_decode=part) for part in (True, False))
        return cls(
            _tensors_of(metadata, decode, decode_len),
            _tensors_of(metadata, prefill, metadata.max_query_len),
            slots,
        )

    def form(self, key_cache: Tensor) -> tuple[Hashable, ...]:
        """What launches follow from in these tensors, besides addresses and values."""
        decodes, prefills, slots = self
        prefill_form = None
        if prefills is not None:
            lengths = prefills.max_query_len, length_class(prefills, key_cache)
            prefill_form = (batch_signature(prefills), *lengths)
        return (
            None if decodes is None else batch_signature(decodes),
            prefill_form,
            None if slots is None else (slots.dtype, slots.shape, slots.stride()),
        )

    def with_workspace(self, num_bytes: int) -> Batch:
        """The batch with a workspace of the decode part that is large enough. That of the builder
        may not be, where queries have more rows than the batch has tokens."""
        decodes = self.decodes
        if decodes is None:
            return self
        space = decodes.workspace
        if space is not None and space.nbytes >= num_bytes:
            return self
        device = decodes.seq_lens.device
        space = torch.empty(num_bytes // 4, dtype=torch.float32, device=device)
        return self._replace(decodes=decodes._replace(workspace=space))

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of all tensors."""
        kept: list[Tensor | None] = [self.slots]
        for part in (self.decodes, self.prefills):
            if part is not None:
                kept += part[:7]  # the other fields are numbers
                kept += part.score_tensors
        return [x.untyped_storage() for x in kept if x is not None]


def _tensors_of(
    metadata: TritonMetadata, part: TritonMetadata | PartTensors, max_query_len: int
) -> BatchTensors:
    """The tensors of a part of the batch, or of the whole batch."""
    flags = part.causal if isinstance(part.causal, Tensor) else None
    score = part.score_tensors
    return BatchTensors(
        part.query_start_loc,
        part.seq_lens,
        part.block_table,
        flags,
        part.query_bias,
        metadata.workspace,
        metadata.counters,
        metadata.max_seq_len,
        tuple(score.values()) if score else (),
        max_query_len,
    )
