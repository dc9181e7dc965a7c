"""One call of a divided prefill: what a rank sends, and where received keys are stored (X10)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnlib.cache.storage import PagedKVCache
from attnlib.layer import Attention
from attnlib.parallel.cache_rows import read_rows, write_rows
from attnlib.parallel.prefill_metadata import PrefillMetadata, PrefillStep

__all__ = ["PrefillCall"]


class PrefillCall(NamedTuple):
    """The tensors of a call.

    Attributes:
        query: `[T, Hq, D]`.
        new: `[num_padded_tokens, Hkv, ...]`, keys and values, or latents only.
        output: `[T, Hq, Dv]`.
        cache: of this rank.
        metadata: the batch.
        writes: whether the layer writes its cache.
    """

    query: Tensor
    new: list[Tensor]
    output: Tensor
    cache: PagedKVCache
    metadata: PrefillMetadata
    writes: bool

    def sent_rows(self) -> list[Tensor]:
        """New keys and values, and the stored context of this rank."""
        slots = self.metadata.context_slots
        return [*self.new, *(read_rows(self.cache, slots) if len(slots) else ())]

    def store(
        self, layer: Attention, keys: list[Tensor], step: PrefillStep, cache_slots: Tensor
    ) -> PagedKVCache:
        """Write received keys to the scratch cache, and this rank's share of the new ones to its
        own. Returns the scratch cache.

        Args:
            layer: writes new keys.
            keys: rows as `sent_rows` gave them on another rank, or those of all ranks.
            step: of the batch.
            cache_slots: `[rows]` int64, of the new keys in this rank's cache.
        """
        scratch = self.metadata.scratch.like(self.cache)
        new, context = keys[: len(self.new)], keys[len(self.new) :]
        if context:
            write_rows(scratch, context, step.context_slots)
        key = new[0]
        value = key[..., : layer.spec.head_size_v] if layer.spec.use_mla else new[1]
        layer.impl.write_kv(key, value, scratch, step.slots)
        if self.writes:
            layer.impl.write_kv(key, value, self.cache, cache_slots)
        return scratch
