"""A small correct backend, divided into small methods so that `wrong_backends` can override one.

It computes in float64, one request at a time. It reads lengths and block tables from the tensors of
the metadata at run time, so that it supports replayed steps (CUDA graphs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.capabilities import Capabilities, Sizes
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.compressed import CompressedKeys
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionType, CudaGraphSupport, MaskKind


@dataclass(kw_only=True)
class ToyMetadata(AttentionMetadata):
    """The tensors of the batch."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    causal: bool | torch.Tensor
    score_tensors: dict[str, torch.Tensor] | None = None


class ToyBuilder(AttentionMetadataBuilder[ToyMetadata]):
    cudagraph_support = CudaGraphSupport.ALWAYS

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ToyMetadata:
        common = common_attn_metadata
        assert common.block_table_tensor is not None
        return ToyMetadata(
            num_prefills=common.num_reqs,
            num_prefill_tokens=common.num_actual_tokens,
            num_decode_tokens=0,
            slot_mapping=common.slot_mapping,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            causal=self.spec.is_causal if common.causal is None else common.causal,
            score_tensors=common.score_tensors,
        )


class ToyImpl(AttentionImpl):
    """Attention, one overridable method for each step."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for request, seq_len in enumerate(seq_lens):
            rows = slice(starts[request], starts[request + 1])
            causal = metadata.causal
            causal = bool(causal[request]) if isinstance(causal, torch.Tensor) else causal
            keys, values = self.gather(cache, metadata.block_table[request], seq_len)
            self.request, self.batch_tensors = request, metadata.score_tensors
            out, denominator = self.attend(query[rows].double(), keys, values, seq_len, causal)
            output[rows] = out.to(output.dtype)
            self.store_lse(lse, rows, denominator)
        self.clear_tail(output, lse, starts[-1])

    lists: SelectedKeys | None = None
    compressed: CompressedKeys | None = None

    def forward_compressed(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        compressed_keys: CompressedKeys,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        self.compressed, self.starts = compressed_keys, metadata.query_start_loc.tolist()
        self.forward(query, cache, metadata, output, lse)
        self.compressed = None

    def entry_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """The entries that each query sees, from `EntryBatch.num_entries`."""
        return counts

    def entries_of_request(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [q, Hq, E] of the entries, -inf for hidden ones, and values [E, Hq, Dv]."""
        assert self.compressed is not None
        batch, cache = self.compressed.batch, self.compressed.cache
        first = self.starts[self.request]
        counts = self.entry_counts(batch.num_entries[first : first + len(query)].long())
        entry = torch.arange(int(counts.max()) if len(counts) else 0, device=query.device)
        row = batch.block_table[first] if len(query) else batch.block_table[0]
        row = row.where((row >= 0) & (row < cache.num_blocks), 0)
        slots = row[entry // cache.block_size].long() * cache.block_size
        slots = slots + entry % cache.block_size
        heads = [self.kv_head_of(head) for head in range(self.spec.num_heads)]
        keys = self.read(cache.key_cache, slots, self.key_scale(cache))[:, heads]
        values = self.read(cache.value_cache, slots, self.value_scale(cache))[:, heads]
        seen = (entry < counts[:, None])[:, None]
        if self.compressed.selected is not None:
            lists = self.compressed.selected.indices[first : first + len(query)].long()
            seen = seen & (lists[..., None] == entry).any(dim=2)
        scores = self.scale * torch.einsum("qhd,khd->qhk", query, keys)
        if self.spec.logits_soft_cap:
            scores = self.spec.logits_soft_cap * torch.tanh(scores / self.spec.logits_soft_cap)
        values = values.masked_fill(~seen.any(dim=0).any(dim=0)[:, None, None], 0.0)
        return scores.masked_fill(~seen, -torch.inf), values

    def forward_selected(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        selected_keys: SelectedKeys,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        self.lists, self.starts = selected_keys, metadata.query_start_loc.tolist()
        self.forward(query, cache, metadata, output, lse)
        self.lists = None

    def selected(self, request: int, p: torch.Tensor, num_keys: int) -> torch.Tensor:
        """[q, Hq, S] bool: the keys that the list of each query and head selects."""
        assert self.lists is not None and self.spec.key_selection is not None
        size, first = self.spec.key_selection.query_block_size, self.starts[request]
        if self.lists.list_start_loc is not None:
            first = int(self.lists.list_start_loc[request])
        rows = first + torch.arange(len(p), device=p.device) // size
        entries = self.lists.indices[rows].long()  # [q, H, K]
        blocks = self.blocks_of(torch.arange(num_keys, device=p.device))
        chosen = (self.entries(entries)[..., None] == blocks).any(dim=2)
        return chosen.repeat_interleave(self.spec.num_heads // entries.shape[1], dim=1)

    def blocks_of(self, positions: torch.Tensor) -> torch.Tensor:
        """The selectable block of each position."""
        assert self.spec.key_selection is not None
        return positions // self.spec.key_selection.block_size

    def entries(self, entries: torch.Tensor) -> torch.Tensor:
        """The entries of the lists [q, H, K] that count."""
        return entries

    def clear_tail(self, output: torch.Tensor, lse: torch.Tensor | None, row: int) -> None:
        output[row:] = 0
        if lse is not None:
            lse[row:] = -torch.inf

    def store_lse(self, lse: torch.Tensor | None, rows: slice, values: torch.Tensor) -> None:
        if lse is not None:
            lse[rows] = values.float()

    def gather(
        self, cache: PagedKVCache, row: torch.Tensor, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, Hkv, D] and [S, Hkv, Dv] in float64, dequantized."""
        position = torch.arange(seq_len, device=row.device)
        if self.lists is not None:  # entries of blocks that no list selects are invalid
            row = row.where((row >= 0) & (row < cache.num_blocks), 0)
        slots = (
            row[position // cache.block_size].long() * cache.block_size
            + position % cache.block_size
        )
        return self.read(cache.key_cache, slots, self.key_scale(cache)), self.read(
            cache.value_cache, slots, self.value_scale(cache)
        )

    def read(self, view: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        raw = view.view(torch.uint8) if view.element_size() == 1 else view
        tokens = raw[slots // view.shape[1], slots % view.shape[1]].view(view.dtype).double()
        invalid = (scale < 2.0**-100) | (scale > 2.0**100)  # M9
        return tokens * scale.masked_fill(invalid, torch.nan)[:, None]

    def key_scale(self, cache: PagedKVCache) -> torch.Tensor:
        return (
            torch.as_tensor(cache.k_scale, device=cache.device)
            .double()
            .expand(self.spec.num_kv_heads)
        )

    def value_scale(self, cache: PagedKVCache) -> torch.Tensor:
        return (
            torch.as_tensor(cache.v_scale, device=cache.device)
            .double()
            .expand(self.spec.num_kv_heads)
        )

    def kv_head_of(self, head: int) -> int:
        return head // self.spec.group_size

    def first_position(self, query_len: int, seq_len: int) -> int:
        return seq_len - query_len

    def left_keys(self, query_len: int) -> int | None:
        return self.spec.visible_window.left

    def logits(
        self, query: torch.Tensor, keys: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        """[q, Hq, S] before the mask."""
        scores = self.scale * torch.einsum("qhd,khd->qhk", query, keys)
        if self.spec.logits_soft_cap:
            scores = self.spec.logits_soft_cap * torch.tanh(scores / self.spec.logits_soft_cap)
        if self.alibi_slopes is not None:
            scores = scores - self.alibi_slopes.double()[None, :, None] * distance.abs()[:, None, :]
        return scores

    def visible(
        self, p: torch.Tensor, k: torch.Tensor, causal: bool, query_len: int
    ) -> torch.Tensor:
        seen = (
            (k <= p)
            if causal
            else torch.ones(len(p), k.shape[1], dtype=torch.bool, device=p.device)
        )
        left, right = self.left_keys(query_len), self.spec.visible_window.right
        if left is not None:
            seen = seen & (k >= p - left)
        if right is not None:
            seen = seen & (k <= p + right)
        chunk = self.spec.attention_chunk_size
        return seen if chunk is None else seen & (k // chunk == p // chunk)

    def sink(self, query_len: int) -> torch.Tensor | None:
        return self.sinks

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seq_len: int,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One request: out [q, Hq, Dv] and LSE [q, Hq], float64."""
        heads = [self.kv_head_of(head) for head in range(self.spec.num_heads)]
        keys, values = keys[:, heads], values[:, heads]
        query_len = query.shape[0]
        p = (
            self.first_position(query_len, seq_len)
            + torch.arange(query_len, device=query.device)[:, None]
        )
        k = torch.arange(keys.shape[0], device=query.device)[None, :]
        scores = self.logits(query, keys, p - k)
        seen = (self.visible(p, k, causal, query_len) & (k < seq_len))[:, None, :]
        if self.lists is not None:
            seen = seen & self.selected(self.request, p, keys.shape[0])
            values = values.masked_fill(~seen.any(dim=0).T[..., None], 0.0)
        scores = self.score_and_mask(scores, seen, p, k)
        if self.compressed is not None:
            more, more_values = self.entries_of_request(query)
            scores, values = torch.cat((scores, more), 2), torch.cat((values, more_values))
        return self.weigh(scores, values, self.sink(query_len))

    def score_and_mask(
        self, scores: torch.Tensor, seen: torch.Tensor, p: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        """[q, Hq, S] from scores [q, Hq, S], mask [q, 1 or Hq, S], positions [q, 1] and [1, S]."""
        return self.score(scores, p, k).masked_fill(~seen, -torch.inf)

    def score(self, scores: torch.Tensor, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        function = self.spec.score_function
        if function is None:
            return scores
        heads = torch.arange(self.spec.num_heads, device=scores.device)[None, :, None]
        own = dict(zip(function.layer_tensors, self.layer_score_tensors, strict=True))
        tensors = own | dict(self.batch_tensors or {})
        q_pos, k_pos = self.positions(p, k)
        return function.evaluate(scores, q_pos, k_pos, heads, self.request, tensors)

    def positions(self, p: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key positions for the score function, from [q, 1] and [1, S]."""
        return p[:, None, :], k[None]

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = scores
        if sink is not None:
            logits = torch.cat(
                [scores, sink.double()[None, :, None].expand(*scores.shape[:2], 1)], dim=2
            )
        if logits.shape[2] == 0:
            return scores.new_zeros(*scores.shape[:2], values.shape[2]), scores.new_full(
                scores.shape[:2], -torch.inf
            )
        lse = torch.logsumexp(logits, dim=2)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        out = torch.einsum("qhk,khd->qhd", weights, values)
        without_keys = (scores == -torch.inf).all(dim=2, keepdim=True)
        return out.masked_fill(without_keys, 0.0), lse  # also under a scale of NaN (M5)


TOY_CAPABILITIES = Capabilities(
    devices=("cpu", "cuda"),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    kv_cache_dtypes=(
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
    kv_formats=(),
    kv_format_pairs=(),
    kv_scale_kinds=("tensor", "head"),
    head_sizes=Sizes(1),
    head_size_v_may_differ=True,
    block_sizes=Sizes(1),
    kv_cache_layouts=("NHD", "HND", "ANY"),
    group_sizes=Sizes(1),
    attn_types=(AttentionType.DECODER,),
    mask_kinds=(MaskKind.CAUSAL, MaskKind.BIDIRECTIONAL, MaskKind.PER_REQUEST),
    sliding_window=True,
    attention_chunks=True,
    logits_soft_cap=True,
    alibi=True,
    sink=True,
    score_function=True,
    key_selection=True,
    compressed_entries=True,
    mla=True,
    lse=True,
    kv_sharing=True,
    batch_invariant=False,
    cudagraph=CudaGraphSupport.ALWAYS,
)


class ToyBackend(AttentionBackend):
    """Correct for everything that it declares."""

    capabilities = TOY_CAPABILITIES

    @staticmethod
    def get_name() -> str:
        return "toy"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return ToyImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return ToyBuilder


def toy_with(
    impl: type[AttentionImpl] = ToyImpl,
    builder: type[AttentionMetadataBuilder[Any]] = ToyBuilder,
    **declared: Any,
) -> type[AttentionBackend]:
    """The toy backend with another impl or builder and some changed capabilities."""

    class Changed(ToyBackend):
        capabilities = replace(TOY_CAPABILITIES, **declared)

        @staticmethod
        def get_name() -> str:
            return impl.__name__ if impl is not ToyImpl else builder.__name__

        @staticmethod
        def get_impl_cls() -> type[AttentionImpl]:
            return impl

        @staticmethod
        def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
            return builder

    return Changed
