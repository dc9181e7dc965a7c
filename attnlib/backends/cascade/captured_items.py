"""Decodes with shared prefixes in CUDA graphs: one tensor of fixed capacity holds their items.

A captured graph contains the launches of the kernel of the items and of the merge, whose grids do
not depend on a batch. Every batch fills the tensor that they read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnlib.backends.cascade.schedule import PrefixRule, decode_segments
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.shared_prefix import SharedPrefix
from attnlib.ops.shared_decode import (
    ITEM_FIELDS,
    PRODUCT_ROWS,
    SEGMENT_FIELDS,
    DecodeItems,
    padded_size,
)
from attnlib.ops.shared_decode_schedule import schedule_items
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["CapturedItems"]


class CapturedItems:
    """The items that graphs of one builder read.

    Args:
        spec: of the layers.
        device: of the batches.
        limits: the largest batch that is captured.
        rule: how many items of prefixes a graph has room for.
        shape: keys of a tile and ranges (`AttentionMetadataBuilder.shared_decode_shape`).
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        limits: BatchLimits,
        rule: PrefixRule,
        shape: tuple[int, int],
    ) -> None:
        self._spec, self._shape = spec, shape
        reqs, tokens = limits.max_num_reqs, limits.max_num_tokens
        self._max_items = rule.captured_parts
        rows = PRODUCT_ROWS // spec.group_size
        # The other keys of requests are items of `rows` tokens, of which all but the last are full.
        items = self._max_items + -(-reqs // rows)
        # A split more for each range at most, with up to two products of partial results.
        self._num_partials = 2 * rows * (items + shape[1])
        self._sizes = [
            4 * shape[1],
            SEGMENT_FIELDS * (reqs + self._max_items),
            ITEM_FIELDS * items,
            reqs + 2 * rows * self._max_items,
            tokens + 1,
            self._num_partials,
        ]
        total = sum(map(padded_size, self._sizes))
        self._packed = torch.zeros(total, dtype=torch.int32, device=device)
        self._sources: set[tuple[int, int, int]] = set()

    def add_source(self, common: CommonAttentionMetadata) -> None:
        """Note the tensors and sizes of a batch that is captured."""
        self._sources.add(_source(common))

    def holds(self, common: CommonAttentionMetadata) -> bool:
        """Whether a batch is in the tensors of one that was captured, and has its sizes."""
        return _source(common) in self._sources

    def fill(
        self, prefixes: Sequence[SharedPrefix], common: CommonAttentionMetadata
    ) -> tuple[list[SharedPrefix], DecodeItems]:
        """Fill the tensor for a batch, which is padded to the size of its graph.

        Returns:
            (prefixes for which there is room, items). Prefixes at the end of the list, which
            continue others, are left out first.
        """
        assert common.query_start_loc_cpu is not None and common.seq_lens_cpu is not None
        starts, lens = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu.tolist()
        kept = list(prefixes)
        segments = decode_segments(kept, starts, lens, self._spec)
        while len(segments) > self._max_items + starts[-1]:
            kept.pop()
            segments = decode_segments(kept, starts, lens, self._spec)
        spec, tokens = self._spec, common.num_actual_tokens
        lists = schedule_items(segments, tokens, spec.group_size, spec.block_size, *self._shape)
        host = torch.tensor(lists.packed(self._sizes), dtype=torch.int32, device="cpu")
        self._packed.copy_(host, non_blocking=True)
        lists = lists._replace(num_partials=self._num_partials)
        return kept, lists.of(self._packed, self._sizes)


def _source(common: CommonAttentionMetadata) -> tuple[int, int, int]:
    return common.seq_lens.data_ptr(), common.num_reqs, common.num_actual_tokens
