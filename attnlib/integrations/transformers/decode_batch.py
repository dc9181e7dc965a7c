"""Batches of decode steps on a GPU, made without reading the padding on the host.

A host read in every step would wait for the GPU. The visible keys of each row are compacted into a
block table on the device; sizes that the host needs are upper bounds. Over keys that grow in place
(`growing_cache`), and over those of a full window, metadata, table and plans outlive a step: only
values change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from attnlib.integrations.transformers.cache_buffers import capacity_of
from attnlib.integrations.transformers.layers import (
    builder_for,
    current_stream,
    is_transient,
)
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.step_mask import StepMask, first_visible_key
from attnlib.layer import Attention
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.ops.dispatch import operation

if TYPE_CHECKING:
    from attnlib.ops.torch.visible_keys import KeyLister

__all__ = [
    "BoundCall",
    "DecodeBatch",
    "batch_of_visible_keys",
    "decode_batch",
    "lasting_tokens",
    "sees_all_keys",
]

_MAX_BATCHES = 64
"""Batches of one thread."""

_local = threading.local()


@dataclass(eq=False)
class BoundCall:
    """The launcher of a batch over the tensors of transformers, once a layer has run.

    Attributes:
        group: what the layers of one plan have in common; None before.
        launch: the launcher; None where the backend has none.
    """

    group: Any = None
    launch: Callable[..., bool] | None = None


@dataclass(eq=False)
class DecodeBatch:
    """One query per row over the keys that it sees.

    Attributes:
        table: `[B, bound]` int32 block ids of the visible keys.
        lengths: `[B]` int32 visible keys.
        starts: `[B + 1]` int32, 0 to B.
        ratio: distance between two rows in block ids.
        metadata: what the metadata builder returned; it reads the tensors.
        bound_call: see `BoundCall`.
        filled_for: number of the step whose table and lengths these are; 0 for none.
        lister: writes table and lengths; None before the first ones.
        shown: keys that every row sees, if the table lists all that there may be; 0 otherwise.
    """

    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    ratio: int
    metadata: AttentionMetadata = field(init=False)
    bound_call: BoundCall = field(default_factory=BoundCall)
    filled_for: int = 0
    lister: KeyLister | None = None
    shown: int = 0

    def fill(self, step: StepMask, pattern: Pattern) -> None:
        """Write table and lengths of a step. No host sync."""
        visible, padding = step.padding(), step.attention_mask
        if visible is None or padding is None:
            self._show_all(step.width)
        else:
            if pattern.depends_on_distance and not sees_all_keys(step):
                first = first_visible_key(step, pattern, padding)
                columns = torch.arange(step.width, device=visible.device)
                begin = first if isinstance(first, int) else first[:, None]
                visible = visible & (columns >= begin)
            self.show(visible)
        self.filled_for = step.number

    def _show_all(self, tokens: int) -> None:
        """Every row sees its first tokens: only the lengths change from one step to the next."""
        if not self.shown:
            table = self.table
            self.show(torch.ones(table.shape, dtype=torch.bool, device=table.device))
        if self.shown != tokens:
            self.lengths.fill_(tokens)
            self.shown = tokens

    def show(self, visible: torch.Tensor) -> None:
        """Write table and lengths of the keys that the rows see, `[B, up to tokens]` bool. No host
        sync."""
        lister = self.lister
        if lister is None:
            make = operation("visible_keys", "KeyLister", visible)
            tensors = {"table": self.table, "lengths": self.lengths, "starts": self.starts}
            lister = self.lister = make(self.ratio, **tensors)
        lister.run(visible)
        self.filled_for = self.shown = 0


def batch_of_visible_keys(layer: Attention, visible: torch.Tensor, ratio: int) -> DecodeBatch:
    """The batch of single queries that see these keys.

    Args:
        layer: of the call.
        visible: `[B, S]` bool.
        ratio: distance between two rows in block ids (`token_pages`).
    """
    (batch, tokens), device = visible.shape, visible.device
    kept: dict[Any, DecodeBatch] = _local.__dict__.setdefault("batches", {})
    stream = current_stream(device)
    key = ("visible", layer.backend, layer.spec, batch, ratio, tokens, device, stream)
    found = None if is_transient() else kept.get(key)
    if found is not None:
        found.show(visible)
        return found
    found = _make(batch, tokens, ratio, device)
    found.show(visible)
    _add_metadata(layer, found)
    if not is_transient():
        if len(kept) >= _MAX_BATCHES:
            kept.clear()
        kept[key] = found
    return found


def decode_batch(
    layer: Attention, step: StepMask, pattern: Pattern, ratio: int, capacity: int | None
) -> DecodeBatch:
    """The filled batch of a step.

    Args:
        layer: of the step.
        step: its mask, with one query per row and padding.
        pattern: of the mask.
        ratio: distance between two rows in block ids (`token_pages`).
        capacity: of `lasting_tokens`; None for keys of this step only.
    """
    device = step.attention_mask.device if step.attention_mask is not None else step.device
    kept: dict[Any, DecodeBatch] = _local.__dict__.setdefault("batches", {})
    key = (
        layer.backend,
        layer.spec,
        step.batch_size,
        ratio,
        capacity,
        pattern,
        device,
        current_stream(torch.device(device)),
    )
    found = None if capacity is None else kept.get(key)
    if found is not None:
        if found.filled_for != step.number:
            found.fill(step, pattern)
        return found
    bound = _bound(step.width if capacity is None else capacity, pattern)
    found = _make(step.batch_size, bound, ratio, torch.device(device))
    found.fill(step, pattern)
    _add_metadata(layer, found)
    if capacity is not None:
        if len(kept) >= _MAX_BATCHES:
            kept.clear()
        kept[key] = found
    return found


def lasting_tokens(step: StepMask, key: torch.Tensor, value: torch.Tensor) -> int | None:
    """Tokens of a batch that serves this step and later ones: those that buffers have room for, or
    those of a static cache or a full window, whose number stays. None for keys of which the next
    step has more.

    Args:
        step: the mask.
        key, value: `[B, Hkv, S, D]` and `[B, Hkv, S, Dv]` of a layer of the step.
    """
    if step.is_static:
        return step.width
    capacity, pattern = capacity_of(key, value), step.pattern
    if capacity is not None or pattern is None or not sees_all_keys(step):
        return capacity
    return step.kv_length if pattern.window.left == step.kv_length - 1 else None


def sees_all_keys(step: StepMask) -> bool:
    """Whether the window of a single query per row hides no key."""
    pattern = step.pattern
    if pattern is None or pattern.window.left is None or pattern.chunk is not None:
        return False
    return step.width == step.kv_length <= pattern.window.left + 1


def _bound(tokens: int, pattern: Pattern) -> int:
    """The most of so many keys that a single query sees."""
    left = pattern.window.left
    limits = (tokens, pattern.chunk, None if left is None else left + 1)
    return min(limit for limit in limits if limit is not None)


def _make(batch: int, bound: int, ratio: int, device: torch.device) -> DecodeBatch:
    """A batch whose queries see up to `bound` keys, without values and metadata. Each layer of a
    recorded graph makes one: values that `show` replaces would be further launches."""
    with torch.inference_mode(False):  # writable in and outside of inference mode
        options: Any = {"dtype": torch.int32, "device": device}
        sizes = (batch, bound), (batch,), (batch + 1,)
        table, lengths, starts = (torch.empty(size, **options) for size in sizes)
    return DecodeBatch(table, lengths, starts, ratio)


def _add_metadata(layer: Attention, made: DecodeBatch) -> None:
    """Make the metadata of a batch that has values: on a CPU builders read them."""
    (rows, bound), device = made.table.shape, made.table.device
    with torch.inference_mode(False):
        common = CommonAttentionMetadata(
            query_start_loc=made.starts,
            query_start_loc_cpu=torch.arange(rows + 1, dtype=torch.int32, device="cpu"),
            seq_lens=made.lengths,
            num_reqs=rows,
            num_actual_tokens=rows,
            max_query_len=1,
            max_seq_len=bound,
            block_table_tensor=made.table,
            is_cross_attention=True,  # a row without tokens has more queries than keys
        )
        made.metadata = builder_for(layer.backend, layer.spec, device).build(0, common)
