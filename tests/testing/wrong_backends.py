"""Backends that are wrong on purpose. Each differs from the toy backend in one step.

`WRONG` maps each error to the backend and to the check that is meant to detect it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.impl import TorchImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.device import DeviceInfo
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.ops.torch import key_indexer, packed_latents
from attnlib.spec import AttentionSpec
from tests.testing.toy_backend import ToyBackend, ToyBuilder, ToyImpl, ToyMetadata, toy_with
from tests.testing.wrong_at_scale import SUBTLE
from tests.testing.wrong_from_reports import REPORTED
from tests.testing.wrong_operations import WRONG_OPERATIONS, OtherOperation
from tests.testing.wrong_query_tensors import WRONG_QUERY_TENSORS
from tests.testing.wrong_rotations import WRONG_ROTATIONS


class OffByOneWindow(ToyImpl):
    """Sees W keys before the query's own key: one key too many."""

    def left_keys(self, query_len: int) -> int | None:
        left = super().left_keys(query_len)
        return None if left is None else left + 1


class WindowOnPrefillOnly(ToyImpl):
    """Applies the window to prefills only."""

    def left_keys(self, query_len: int) -> int | None:
        return None if query_len == 1 else super().left_keys(query_len)


class IgnoredSoftCap(ToyImpl):
    """Does not apply the soft cap."""

    def logits(
        self, query: torch.Tensor, keys: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        capped, self.spec = self.spec, self.spec.replace(logits_soft_cap=None)
        scores = super().logits(query, keys, distance)
        self.spec = capped
        return scores


class ScaleTwiceUnderSoftCap(ToyImpl):
    """Scales the capped score again."""

    def logits(
        self, query: torch.Tensor, keys: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        return super().logits(query, keys, distance) * (
            self.scale if self.spec.logits_soft_cap else 1.0
        )


class BaseTwoLse(ToyImpl):
    """Returns the LSE of exp2 without conversion."""

    def store_lse(self, lse: torch.Tensor | None, rows: slice, values: torch.Tensor) -> None:
        super().store_lse(lse, rows, values / math.log(2))


class TransposedLse(ToyImpl):
    """Stores [Hq, T], as flash-attn does, in a [T, Hq] tensor."""

    def clear_tail(self, output: torch.Tensor, lse: torch.Tensor | None, row: int) -> None:
        super().clear_tail(output, lse, row)
        if lse is not None:
            lse.copy_(lse.T.contiguous().view_as(lse))


class SinkPerSplit(ToyImpl):
    """Splits long key ranges and adds the sink to the denominator of each split."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cut = scores.shape[2] // 2
        if sink is None or cut < 64:
            return super().weigh(scores, values, sink)
        a, lse_a = super().weigh(scores[..., :cut], values[:cut], sink)
        b, lse_b = super().weigh(scores[..., cut:], values[cut:], sink)
        lse = torch.logaddexp(lse_a, lse_b)
        return a * torch.exp(lse_a - lse)[..., None] + b * torch.exp(lse_b - lse)[..., None], lse


class SinkIgnoredInDecode(ToyImpl):
    """Applies sinks to prefills only."""

    def sink(self, query_len: int) -> torch.Tensor | None:
        return None if query_len == 1 else self.sinks


class TopLeftCausal(ToyImpl):
    """Top-left mask as in torch's is_causal: the first query sees only the first key."""

    def first_position(self, query_len: int, seq_len: int) -> int:
        return 0 if query_len > 1 else seq_len - 1


class IgnoredKScale(ToyImpl):
    """Does not multiply stored keys by their scale."""

    def key_scale(self, cache: PagedKVCache) -> torch.Tensor:
        return torch.ones(self.spec.num_kv_heads, dtype=torch.float64)


class IgnoredVScale(ToyImpl):
    """Does not multiply stored values by their scale."""

    def value_scale(self, cache: PagedKVCache) -> torch.Tensor:
        return torch.ones(self.spec.num_kv_heads, dtype=torch.float64)


class PerHeadScaleAveraged(ToyImpl):
    """Uses the mean of the per-head scales."""

    def value_scale(self, cache: PagedKVCache) -> torch.Tensor:
        scale = super().value_scale(cache)
        return scale.mean().expand_as(scale)


class WritesSlotMinusOne(ToyImpl):
    """Writes slot -1 to the last slot of the pool, as a negative Python index does."""

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        last = cache.num_slots - 1
        super().write_kv(key, value, cache, torch.where(slot_mapping < 0, last, slot_mapping))


class IgnoresMappingLength(ToyImpl):
    """Writes all tokens of the key, also those past the end of slot_mapping."""

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        missing = key.shape[0] - slot_mapping.shape[0]
        more = torch.arange(1, missing + 1) + (slot_mapping.max() if slot_mapping.numel() else 0)
        super().write_kv(
            key, value, cache, torch.cat([slot_mapping, more.clamp(max=cache.num_slots - 1)])
        )


class WrapsInsteadOfSaturating(ToyImpl):
    """Casts to fp8 without clamping."""

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        limit = torch.finfo(cache.dtype).max
        super().write_kv(key % limit, value % limit, cache, slot_mapping)


class ReadsPastTable(ToyImpl):
    """Loads one block table entry past the end and reads its block."""

    def gather(
        self, cache: PagedKVCache, row: torch.Tensor, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needed = -(-seq_len // cache.block_size)
        beyond = torch.as_strided(row, (needed + 1,), (1,), row.storage_offset())
        cache.key_cache[beyond.long()]
        return super().gather(cache, row, seq_len)


class Int32Offsets(ToyImpl):
    """Computes element offsets in 32 bits, which overflow at 2^31."""

    def read(self, view: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        block = slots // view.shape[1]
        wrapped = (block * view.stride(0)).to(torch.int32).to(torch.int64)
        block = torch.where(wrapped < 0, 0, wrapped // view.stride(0))
        return super().read(view, block * view.shape[1] + slots % view.shape[1], scale)


class NanFromUnusedValues(ToyImpl):
    """Reads all block table entries; masked values are multiplied by zero."""

    def gather(
        self, cache: PagedKVCache, row: torch.Tensor, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().gather(
            cache, row.clamp(0, cache.num_blocks - 1), row.shape[0] * cache.block_size
        )


class ValuesClearedByBlock(ToyImpl):
    """Masks scores by token and values by block: the tail of the last block is read."""

    def gather(
        self, cache: PagedKVCache, row: torch.Tensor, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = -(-seq_len // cache.block_size)
        return super().gather(cache, row, blocks * cache.block_size)


class UninitializedAccumulator(ToyImpl):
    """Accumulates into uninitialized memory."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(scores, values, sink)
        return out + 0.0 * torch.empty(out.shape, dtype=out.dtype).clamp(-1, 1), lse


class StaleMetadataBuilder(ToyBuilder):
    """Copies table and lengths at build time: a replayed graph reads old values."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ToyMetadata:
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return replace(
            built, block_table=built.block_table.clone(), seq_lens=built.seq_lens.clone()
        )


class SharedStateBuilder(ToyBuilder):
    """Stores its state on the class, where the builder of another kind of layer overwrites it."""

    left: ClassVar[int | None] = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ToyMetadata:
        SharedStateBuilder.left = self.spec.visible_window.left
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class ReadsSharedState(ToyImpl):
    """Reads the state that the builders of all kinds share."""

    def left_keys(self, query_len: int) -> int | None:
        return SharedStateBuilder.left


class FirstCallPlan:
    """A step plan over the tensors of the call that it was prepared for."""

    def __init__(self, query: torch.Tensor, cache: PagedKVCache, metadata: Any) -> None:
        self.query, self.cache, self.metadata = query, cache, metadata

    def run(
        self,
        impl: AttentionImpl,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        if key is not None and value is not None:
            impl.write_kv(key, value, cache, self.metadata.slot_mapping)
        impl.forward(self.query, self.cache, self.metadata, output, lse)


class PlansKeepTensors(ToyImpl):
    """Reuses the query and the cache of the first call in later calls."""

    def plan(
        self,
        signature: Hashable,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> FirstCallPlan:
        return FirstCallPlan(query, cache, metadata)


class BatchDependentBits(ToyImpl):
    """Rounds differently if the batch has more than two requests."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(query, cache, metadata, output, lse)
        if metadata.seq_lens.shape[0] > 2:
            output.copy_(torch.nextafter(output, torch.zeros_like(output)))


class OneRequestBits(ToyImpl):
    """Batch-invariant for batches of one request only; larger ones are rounded differently."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(query, cache, metadata, output, lse)
        if metadata.seq_lens.shape[0] > 1:
            output.copy_(torch.nextafter(output, torch.zeros_like(output)))


class GraphPaddingBits(ToyImpl):
    """Batch-invariant, but rounds differently if the batch has padding requests."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(query, cache, metadata, output, lse)
        if bool((metadata.seq_lens == 0).any()):
            output.copy_(torch.nextafter(output, torch.zeros_like(output)))


class WrongGroups(ToyImpl):
    """Maps heads incorrectly if the group size is not a power of two."""

    def kv_head_of(self, head: int) -> int:
        group = self.spec.group_size
        return head // group if group & (group - 1) == 0 else head % self.spec.num_kv_heads


class InterleavedHeads(ToyImpl):
    """Maps query head h to KV head h % Hkv."""

    def kv_head_of(self, head: int) -> int:
        return head % self.spec.num_kv_heads


class KeysOfInterleavedHeads(ToyImpl):
    """Reads the values of the right KV head, and the keys of KV head h % Hkv."""

    def logits(
        self, query: torch.Tensor, keys: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        kv_heads = self.spec.num_kv_heads
        first = [(h % kv_heads) * self.spec.group_size for h in range(self.spec.num_heads)]
        return super().logits(query, keys[:, first], distance)


class LeavesPaddingRows(ToyImpl):
    """Does not write the padding rows."""

    def clear_tail(self, output: torch.Tensor, lse: torch.Tensor | None, row: int) -> None:
        return


class AssumesPackedQuery(ToyImpl):
    """Reads q with a token stride of Hq * D."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        heads, size = query.shape[1:]
        packed = torch.as_strided(
            query, query.shape, (heads * size, size, 1), query.storage_offset()
        )
        super().forward(packed, cache, metadata, output, lse)


class FailsOnEmptyRequests(ToyImpl):
    """Computes a maximum over the keys, which fails for requests without keys."""

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seq_len: int,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        torch.amax(keys, dim=0)
        return super().attend(query, keys, values, seq_len, causal)


class UniformWhenNothingIsVisible(ToyImpl):
    """Masks with a finite number: rows that see no key average all values."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().weigh(scores.clamp(min=-1e30), values, sink)


class SharingLayerWrites(ToyImpl):
    """Writes the cache in forward, also if the cache is shared."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(query, cache, metadata, output, lse)
        if self.spec.kv_sharing and metadata.slot_mapping is not None:
            tokens = query[:, : self.spec.num_kv_heads]
            self.write_kv(tokens, tokens, cache, metadata.slot_mapping)


class DifferentBitsEachCall(ToyImpl):
    """Changes the last bit in every second call, as a race does."""

    calls = 0

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(query, cache, metadata, output, lse)
        DifferentBitsEachCall.calls += 1
        if DifferentBitsEachCall.calls % 2:
            output.copy_(torch.nextafter(output, torch.zeros_like(output)))


class IgnoredAlibi(ToyImpl):
    """Does not apply the ALiBi slopes."""

    def logits(
        self, query: torch.Tensor, keys: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        return super().logits(query, keys, distance * 0)


class FirstTileFullyMasked(ToyImpl):
    """Online softmax over tiles of 32 keys: exp(-inf + inf) if the first tile is fully masked."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(scores, values, sink)
        if scores.shape[2] > 32:
            largest = scores[..., :32].amax(dim=2)
            out = out + 0.0 * torch.exp(largest - largest)[..., None]
        return out, lse


class PrivateOrder(ToyImpl):
    """Stores and reads heads in reverse order: wrong only with other backends."""

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().write_kv(key.flip(1), value.flip(1), cache, slot_mapping)

    def read(self, view: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().read(view, slots, scale).flip(1)


class StridesFromShape(ToyImpl):
    """Derives strides from the shape: correct for NHD only."""

    def read(self, view: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        packed = (
            view.shape[1] * view.shape[2] * view.shape[3],
            view.shape[2] * view.shape[3],
            view.shape[3],
            1,
        )
        available = view.untyped_storage().nbytes() // view.element_size() - view.storage_offset()
        fits = 1 + sum((n - 1) * s for n, s in zip(view.shape, packed, strict=True)) <= available
        return super().read(view.as_strided(view.shape, packed) if fits else view, slots, scale)


class EmptyReason(ToyBackend):
    """Returns an empty reason."""

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        return [""] if spec.has_alibi else []


class IgnoredScoreFunction(ToyImpl):
    """Does not apply the score function."""

    def score(self, scores: torch.Tensor, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return scores


class SecondRangeIgnored(ToyImpl):
    """Attends to the first of two ranges of keys that the bounds of a score function return."""

    def score(self, scores: torch.Tensor, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        function, found = self.spec.score_function, super().score(scores, p, k)
        if function is None or function.bounds is None:
            return found
        own = dict(zip(function.layer_tensors, self.layer_score_tensors, strict=True))
        aux = function.namespace(own | dict(self.batch_tensors or {}))
        first, last, *_ = function.bounds(p.min(), p.max(), k.max() + 1, self.request, aux)
        return found.masked_fill(~((k >= first) & (k < last))[:, None], -torch.inf)


class BoundsOfTheFirstHead(ToyImpl):
    """Uses the bounds of the first head for all heads."""

    def score(self, scores: torch.Tensor, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        function, found = self.spec.score_function, super().score(scores, p, k)
        if function is None or function.head_bounds is None:
            return found
        own = dict(zip(function.layer_tensors, self.layer_score_tensors, strict=True))
        aux = function.namespace(own | dict(self.batch_tensors or {}))
        first, last, *_ = function.head_bounds(p.min(), p.max(), k.max() + 1, 0, self.request, aux)
        return found.masked_fill(~((k >= first) & (k < last))[:, None], -torch.inf)


class DroppedTailBlock(ToyImpl):
    """Does not read the last entry of a list."""

    def entries(self, entries: torch.Tensor) -> torch.Tensor:
        return entries[..., :-1]


class SelectionOffByOneBlock(ToyImpl):
    """Counts the blocks from one."""

    def entries(self, entries: torch.Tensor) -> torch.Tensor:
        return torch.where(entries > 0, entries - 1, entries)


class UnmaskedOwnBlock(ToyImpl):
    """Shows the whole block of the query, also the keys after it."""

    def visible(
        self, p: torch.Tensor, k: torch.Tensor, causal: bool, query_len: int
    ) -> torch.Tensor:
        if self.lists is None:
            return super().visible(p, k, causal, query_len)
        end = (self.blocks_of(p) + 1) * self.spec.key_selection.block_size - 1
        return super().visible(end, k, causal, query_len)


class SinkCountedTwice(ToyImpl):
    """Counts the sink twice where keys are selected."""

    def sink(self, query_len: int) -> torch.Tensor | None:
        sinks = super().sink(query_len)
        return sinks if sinks is None or self.lists is None else sinks + math.log(2)


class SinkOfBothStreams(ToyImpl):
    """Counts the sink in both key streams."""

    def sink(self, query_len: int) -> torch.Tensor | None:
        sinks = super().sink(query_len)
        return sinks if sinks is None or self.compressed is None else sinks + math.log(2)


class IncompleteEntries(ToyImpl):
    """Shows the entry that contains the query, before its tokens are complete."""

    def entry_counts(self, counts: torch.Tensor) -> torch.Tensor:
        assert self.compressed is not None
        columns = self.compressed.batch.block_table.shape[1]
        return (counts + 1).clamp(max=columns * self.compressed.cache.block_size)


class IgnoredEntries(ToyImpl):
    """Attends to the layer's own keys only."""

    def entry_counts(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(counts)


class EntriesWithTheirOwnSoftmax(ToyImpl):
    """Adds the results of both streams, each with a softmax of its own."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.compressed is None:
            return super().weigh(scores, values, sink)
        count = int(self.compressed.batch.num_entries[self.starts[self.request] :][:1].sum())
        cut = scores.shape[2] - count
        own, lse = super().weigh(scores[..., :cut], values[:cut], sink)
        other, _ = super().weigh(scores[..., cut:], values[cut:], None)
        return own + other, lse


class SharedListOfFirstHead(ToyImpl):
    """Uses the list of the first head for all heads."""

    def entries(self, entries: torch.Tensor) -> torch.Tensor:
        return entries[:, :1].expand_as(entries)


class IgnoredSelection(ToyImpl):
    """Attends to all visible keys."""

    def selected(self, request: int, p: torch.Tensor, num_keys: int) -> torch.Tensor:
        return torch.ones(len(p), self.spec.num_heads, num_keys, dtype=torch.bool, device=p.device)


class ScoreFunctionAfterMask(ToyImpl):
    """Applies the score function to scores that are masked already."""

    def score_and_mask(
        self, scores: torch.Tensor, seen: torch.Tensor, p: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return self.score(scores.masked_fill(~seen, -torch.inf), p, k)


class SwappedPositions(ToyImpl):
    """Passes key positions as query positions to the score function."""

    def positions(self, p: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q_pos, k_pos = super().positions(p, k)
        return k_pos, q_pos


class RotaryPartFirst(ToyImpl):
    """Reads the values of a latent behind its rotary part."""

    def gather(
        self, cache: PagedKVCache, row: torch.Tensor, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().gather(cache, row, seq_len)
        return keys, keys[..., -values.shape[2] :] if self.spec.use_mla else values


class ScaleOfTheLatent(ToyImpl):
    """Derives the scale from the width of the latent."""

    def logits(
        self, query: torch.Tensor, keys: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        given, self.scale = self.scale, self.spec.head_size**-0.5
        scores = super().logits(query, keys, distance)
        self.scale = given
        return scores


class SkipsRepeatedBlocks(ToyImpl):
    """Takes a block that follows itself in a block table for one block."""

    def gather(
        self, cache: PagedKVCache, row: torch.Tensor, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needed = -(-seq_len // cache.block_size)
        distinct = torch.unique_consecutive(row[:needed])
        last = distinct[-1:].expand(needed - len(distinct))
        return super().gather(cache, torch.cat((distinct, last)), seq_len)


class KeysKeepTheirNorm(ToyImpl):
    """Does not normalize the keys that it rotates."""

    def rotate_and_write_kv(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().rotate_and_write_kv(*args, **{**kwargs, "k_norm": None})


class AlwaysHalfSplit(ToyImpl):
    """Pairs the halves of a head for both styles of rotation."""

    def rotate_and_write_kv(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().rotate_and_write_kv(*args, **{**kwargs, "interleaved": False})


UNCERTIFIED: dict[str, tuple[type[AttentionBackend], set[str]]] = {
    "invariant for batches of one only": (
        toy_with(OneRequestBits, batch_invariant=True),
        {
            "batch composition", "position in the batch", "lengths of other requests",
            "size of the batch", "chunks", "padding", "memory of other requests", "CUDA graphs",
        },
    ),
    "invariant except for graph padding": (
        toy_with(GraphPaddingBits, batch_invariant=True),
        {"padding", "CUDA graphs"},
    ),
}  # fmt: skip
"""Error -> a backend that declares batch invariance, and what its results depend on."""


class TruncatesElements(TorchImpl):
    """Rounds elements of pages toward zero."""

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedKVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().write_kv(key, value, cache, slot_mapping)
        if cache.page_format is not None and cache.dtype is torch.int8:
            above = cache.key_cache.float() * cache.k_scale
            written = slot_mapping[slot_mapping >= 0]
            at = written // cache.block_size, written % cache.block_size
            larger = above[at].abs() > key[: len(slot_mapping)][slot_mapping >= 0].abs()
            cache.key_cache[at] -= larger * cache.key_cache[at].sign()


class ValuesTakeTheScalesOfKeys(TorchImpl):
    """Multiplies the values of pages by the scales of the keys."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        if cache.page_format is not None:
            views = (cache.key_cache, cache.value_cache)
            cache = PagedKVCache(*views, k_scale=cache.k_scale, v_scale=cache.k_scale)
        super().forward(query, cache, metadata, output, lse)


class ReplacesInvalidScales(TorchImpl):
    """Reads a scale that is not finite as 1, which hides it."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        if cache.page_format is not None:
            views = (cache.key_cache, cache.value_cache)
            k_scale, v_scale = (scale.nan_to_num(1.0) for scale in (cache.k_scale, cache.v_scale))
            cache = PagedKVCache(*views, k_scale=k_scale, v_scale=v_scale)
        super().forward(query, cache, metadata, output, lse)


class CoarseQueries(TorchImpl):
    """Rounds float8 queries down to powers of two."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        if self.spec.allow_fp8_queries:
            magnitude = query.float().abs().clamp(min=2.0**-100).log2().floor().exp2()
            query = (magnitude * query.sign()).to(query.dtype)
        super().forward(query, cache, metadata, output, lse)


class OneScalePerToken(OtherOperation):
    """Writes packed latents with the largest scale of a token in place of all four."""

    replaced = "write_packed_latents"

    @staticmethod
    def run(latents: torch.Tensor, data: torch.Tensor, slots: torch.Tensor) -> None:
        kept = latents[: len(slots)][slots >= 0]
        scale = (kept[:, :512].float().abs().amax(-1) / 448.0).clamp(min=2.0**-126)
        packed_latents.write_packed_latents(latents, data, slots)
        for at, row, factor in zip(slots[slots >= 0].tolist(), kept, scale, strict=True):
            token = data[at // data.shape[1], at % data.shape[1]]
            elements = (row[:512].float() / factor).clamp(-448, 448).to(torch.float8_e4m3fn)
            token[:512] = elements.view(torch.uint8)
            token[512:528] = factor.expand(4).contiguous().view(torch.uint8)


class FirstScaleForAllGroups(OtherOperation):
    """Reads all groups of a packed latent with the scale of the first one."""

    replaced = "packed_latent_attention"

    @staticmethod
    def run(query: torch.Tensor, data: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        changed = data.clone(memory_format=torch.contiguous_format)
        changed[..., 512:528] = data[..., 512:516].repeat(1, 1, 4)
        packed_latents.packed_latent_attention(query, changed, *args, **kwargs)


class ReplacesInvalidPackedScales(OtherOperation):
    """Reads a scale of a packed latent that is not finite as 0, which hides it."""

    replaced = "packed_latent_attention"

    @staticmethod
    def run(query: torch.Tensor, data: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        changed = data.clone(memory_format=torch.contiguous_format)
        scales = changed[..., 512:528].view(torch.float32)
        scales.masked_fill_(~scales.isfinite(), 0.0)
        packed_latents.packed_latent_attention(query, changed, *args, **kwargs)


class _WrongIndexer(OtherOperation):
    """Changes the scores [n, H, blocks] of the blocks before the best are chosen."""

    @classmethod
    def change(cls, scores: torch.Tensor, local_blocks: int) -> torch.Tensor:
        raise NotImplementedError

    replaced = "select_keys"

    @classmethod
    def run(cls, *args: Any, **kwargs: Any) -> None:
        own = key_indexer._block_scores

        def changed(*inputs: Any) -> torch.Tensor:
            return cls.change(own(*inputs), inputs[-1])

        with mock.patch.object(key_indexer, "_block_scores", changed):
            key_indexer.select_keys(*args, **kwargs)


class TiesToTheLargestPosition(_WrongIndexer):
    """Prefers the last of several equal scores."""

    @classmethod
    def change(cls, scores: torch.Tensor, local_blocks: int) -> torch.Tensor:
        return scores + 1e-3 * torch.arange(scores.shape[-1], device=scores.device)


class NoLocalBlocks(_WrongIndexer):
    """Scores the last blocks of a query as any others."""

    @classmethod
    def change(cls, scores: torch.Tensor, local_blocks: int) -> torch.Tensor:
        return scores.masked_fill(scores == torch.inf, -1.0) if local_blocks else scores


class IndexScalesIgnored(OtherOperation):
    """Scores stored float8 index keys without the scales of their tokens."""

    replaced = "select_keys"

    @staticmethod
    def run(*args: Any, **kwargs: Any) -> None:
        key_indexer.select_keys(*args[:3], None, *args[4:], **kwargs)


def _torch_with(impl: type[TorchImpl]) -> type[AttentionBackend]:
    """The torch backend with another implementation; it supports all formats."""
    return type(impl.__name__, (TorchBackend,), {"get_impl_cls": staticmethod(lambda: impl)})


WRONG: dict[str, tuple[type[AttentionBackend], str]] = {
    **SUBTLE,
    **REPORTED,
    **WRONG_OPERATIONS,
    **WRONG_ROTATIONS,
    **WRONG_QUERY_TENSORS,
    "off-by-one window": (toy_with(OffByOneWindow), "W2"),
    "window on one phase only": (toy_with(WindowOnPrefillOnly), "W2"),
    "ignored soft cap": (toy_with(IgnoredSoftCap), "F1"),
    "soft cap after scale twice": (toy_with(ScaleTwiceUnderSoftCap), "F1"),
    "base-2 LSE": (toy_with(BaseTwoLse), "L1"),
    "base-2 LSE, merged": (toy_with(BaseTwoLse), "L2"),
    "transposed LSE": (toy_with(TransposedLse), "L1"),
    "sink counted per split": (toy_with(SinkPerSplit), "L3"),
    "sink ignored in decode": (toy_with(SinkIgnoredInDecode), "F1"),
    "top-left causal": (toy_with(TopLeftCausal), "W2"),
    "ignored k_scale": (toy_with(IgnoredKScale), "F1"),
    "ignored v_scale": (toy_with(IgnoredVScale), "F1"),
    "one scale for all heads": (toy_with(PerHeadScaleAveraged), "F1"),
    "written slot -1": (toy_with(WritesSlotMinusOne), "K3"),
    "mapping length ignored": (toy_with(IgnoresMappingLength), "K3"),
    "fp8 without saturation": (toy_with(WrapsInsteadOfSaturating), "Q3"),
    "truncated elements of pages": (_torch_with(TruncatesElements), "Q4"),
    "values with the scales of keys": (_torch_with(ValuesTakeTheScalesOfKeys), "Q5"),
    "invalid scales of pages replaced": (_torch_with(ReplacesInvalidScales), "Q6"),
    "read past the table": (toy_with(ReadsPastTable), "O2"),
    "int32 offsets": (toy_with(Int32Offsets), "O1"),
    "NaN from unused V": (toy_with(NanFromUnusedValues), "N1"),
    "V zeroed by a coarser rule than the mask": (toy_with(ValuesClearedByBlock), "N1"),
    "uninitialized accumulator": (toy_with(UninitializedAccumulator), "N1"),
    "stale metadata on graph replay": (toy_with(builder=StaleMetadataBuilder), "G1"),
    "metadata copied under a graph": (toy_with(builder=StaleMetadataBuilder), "G3"),
    "plans that keep the tensors of a call": (toy_with(PlansKeepTensors), "F3"),
    "state shared by layers of all kinds": (toy_with(ReadsSharedState, SharedStateBuilder), "F2"),
    "batch-dependent bits declared invariant": (
        toy_with(BatchDependentBits, batch_invariant=True),
        "D1",
    ),
    "wrong groups for a ratio that is no power of two": (toy_with(WrongGroups), "V2"),
    "interleaved heads": (toy_with(InterleavedHeads), "W3"),
    "keys of interleaved heads": (toy_with(KeysOfInterleavedHeads), "W3"),
    "padding rows not written": (toy_with(LeavesPaddingRows), "N3"),
    "contiguous query assumed": (toy_with(AssumesPackedQuery), "K4"),
    "empty requests crash": (toy_with(FailsOnEmptyRequests), "N2"),
    "rows without keys average all values": (toy_with(UniformWhenNothingIsVisible), "N2"),
    "a sharing layer writes": (toy_with(SharingLayerWrites), "K6"),
    "repeated blocks skipped": (toy_with(SkipsRepeatedBlocks), "N5"),
    "keys that are not normalized": (toy_with(KeysKeepTheirNorm), "K9"),
    "the other style of rotation": (toy_with(AlwaysHalfSplit), "K7"),
    "different bits in the second call": (toy_with(DifferentBitsEachCall), "D2"),
    "ignored ALiBi": (toy_with(IgnoredAlibi), "F1"),
    "NaN where a row's first tile is masked": (toy_with(FirstTileFullyMasked), "N4"),
    "ignored score function": (toy_with(IgnoredScoreFunction), "S1"),
    "score function after the mask": (toy_with(ScoreFunctionAfterMask), "S1"),
    "query and key positions swapped": (toy_with(SwappedPositions), "S1"),
    "second range of keys ignored": (toy_with(SecondRangeIgnored), "S1"),
    "bounds of the first head for all": (toy_with(BoundsOfTheFirstHead), "S1"),
    "dropped tail block": (toy_with(DroppedTailBlock), "S2"),
    "selection off by one block": (toy_with(SelectionOffByOneBlock), "S2"),
    "unmasked own block": (toy_with(UnmaskedOwnBlock), "S2"),
    "sink counted twice": (toy_with(SinkCountedTwice), "S2"),
    "queries of one significant bit": (_torch_with(CoarseQueries), "S5"),
    "sink counted in both key streams": (toy_with(SinkOfBothStreams), "L5"),
    "entries visible before their tokens are complete": (toy_with(IncompleteEntries), "S3"),
    "ignored entries": (toy_with(IgnoredEntries), "S3"),
    "entries with a softmax of their own": (toy_with(EntriesWithTheirOwnSoftmax), "S3"),
    "one list for all heads": (toy_with(SharedListOfFirstHead), "S2"),
    "ignored selection": (toy_with(IgnoredSelection), "S2"),
    "heads in reverse order": (toy_with(PrivateOrder), "K2"),
    "strides inferred from shapes": (toy_with(StridesFromShape), "V2"),
    "rotary part at the wrong offset": (toy_with(RotaryPartFirst), "A1"),
    "scale of the latent": (toy_with(ScaleOfTheLatent), "A1"),
    "one scale for a packed latent": (OneScalePerToken, "A2"),
    "first scale of a packed latent for all groups": (FirstScaleForAllGroups, "A2"),
    "invalid scales of packed latents replaced": (ReplacesInvalidPackedScales, "A5"),
    "ties of index scores to the largest position": (TiesToTheLargestPosition, "I1"),
    "local blocks not always selected": (NoLocalBlocks, "I2"),
    "ignored scales of index keys": (IndexScalesIgnored, "I1"),
    "unsupported without a reason": (EmptyReason, "R1"),
}
"""Error -> the wrong backend and the check that is meant to detect it."""
