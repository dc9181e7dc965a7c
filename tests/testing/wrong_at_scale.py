"""Wrong backends whose errors begin behind a limit: of size, of precision, or of exact bounds.

Each is the kind of a public bug report: workspaces of a fixed number of splits or requests, tiles
that are wrong past some row, positions in too few bits, casts that truncate, tables and bounds of
an engine that are wider than the batch. `SUBTLE` maps each error to the backend and to the check
that is meant to detect it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import CudaGraphSupport
from tests.testing.toy_backend import ToyBuilder, ToyImpl, ToyMetadata, toy_with

_16_BITS = (torch.bfloat16, torch.float16)


class PackedTableBuilder(ToyBuilder):
    """Takes the row stride of the block table from its shape."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ToyMetadata:
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        table = built.block_table
        packed = table.as_strided(table.shape, (table.shape[1], 1), table.storage_offset())
        return replace(built, block_table=packed)


class BoundsBuilder(ToyBuilder):
    """Keeps the upper bound of the sequence lengths."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ToyMetadata:
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        built.max_seq_len = common_attn_metadata.max_seq_len  # type: ignore[attr-defined]
        return built


class DiagonalOfTheBound(ToyImpl):
    """Takes the bound for the length of the longest sequence, and positions from it."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        lens = metadata.seq_lens
        self.longest = int(lens.max()) if len(lens) else 0
        self.bound = getattr(metadata, "max_seq_len", self.longest)
        super().forward(query, cache, metadata, output, lse)

    def first_position(self, query_len: int, seq_len: int) -> int:
        return (self.bound if seq_len == self.longest else seq_len) - query_len


class SinkIsTheFirstMaximum(ToyImpl):
    """Starts the online softmax at the sink: exp(-inf + inf) if it is -inf."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(scores, values, sink)
        return out if sink is None else out + (sink - sink)[None, :, None], lse


class KeysOfLateRequests(ToyImpl):
    """Scales the keys of the requests from 64 on by 1.01."""

    def logits(
        self, query: torch.Tensor, keys: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        return super().logits(query, keys * (1.01 if self.request >= 64 else 1.0), distance)


class WorkspaceOf128Requests(ToyImpl):
    """Computes the first 128 requests of a batch."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(scores, values, sink)
        return (out, lse) if self.request < 128 else (out * 0, lse * 0)


class ValuesOfLateRows(ToyImpl):
    """Scales the results of the query tokens from 64 on by 1.01."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(scores, values, sink)
        out[64:] *= 1.01
        return out, lse


class TileOfLateRows(ToyImpl):
    """Takes the query tokens from 512 on for those of the tile before: 64 keys fewer."""

    def visible(
        self, p: torch.Tensor, k: torch.Tensor, causal: bool, query_len: int
    ) -> torch.Tensor:
        row = torch.arange(query_len, device=p.device)[:, None]
        return super().visible(torch.where(row < 512, p, p - 64), k, causal, query_len)


class SixteenSplits(ToyImpl):
    """Merges the first 16 splits of 128 keys and drops the others."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().weigh(scores[..., :2048], values[:2048], sink)


class WindowByTile(ToyImpl):
    """Rounds the first key of a window down to a tile of 64 where sequences exceed 2048 keys."""

    def visible(
        self, p: torch.Tensor, k: torch.Tensor, causal: bool, query_len: int
    ) -> torch.Tensor:
        left = self.left_keys(query_len)
        if left is None or k.shape[1] <= 2048:
            return super().visible(p, k, causal, query_len)
        return (k <= p) & (k >= (p - left) // 64 * 64)


class AlibiTableOf1024(ToyImpl):
    """Reads ALiBi biases from a table of 1024 distances."""

    def logits(
        self, query: torch.Tensor, keys: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        return super().logits(query, keys, distance.clamp(-1024, 1024))


class BiasedValues(ToyImpl):
    """Scales the values by 1.004 in bfloat16."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factor = 1.004 if self.spec.dtype == torch.bfloat16 else 1.0
        out, lse = super().weigh(scores, values, sink)
        return out * factor, lse


def _toward_zero(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The value of `dtype` at or below the magnitude of each element."""
    rounded = value.to(dtype)
    larger = rounded.double().abs() > value.abs()
    return torch.where(larger, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


class TruncatedOutput(ToyImpl):
    """Converts results to 16 bits by dropping bits."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(scores, values, sink)
        dtype = self.spec.dtype
        return (_toward_zero(out, dtype).double() if dtype in _16_BITS else out), lse


class TruncatedWeights(ToyImpl):
    """Converts weights to 16 bits by dropping bits, and divides by the sum of the exact ones."""

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(scores, values, sink)
        dtype = self.spec.dtype
        if dtype not in _16_BITS or not scores.shape[2]:
            return out, lse
        largest = scores.amax(dim=2, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
        weights = _toward_zero(torch.exp(scores - largest), dtype).double()
        total = torch.exp(lse - largest[..., 0]).clamp(min=1e-300)
        return torch.einsum("qhk,khd->qhd", weights, values) / total[..., None], lse


class SoftCapAfterMask(ToyImpl):
    """Applies the soft cap to masked scores: hidden keys have the score -c."""

    def score_and_mask(
        self, scores: torch.Tensor, seen: torch.Tensor, p: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        masked, cap = super().score_and_mask(scores, seen, p, k), self.spec.logits_soft_cap
        return masked.clamp(min=-cap) if cap else masked


SUBTLE: dict[str, tuple[type[AttentionBackend], str]] = {
    "row stride of a table from its shape": (toy_with(builder=PackedTableBuilder), "O2"),
    "diagonal from the bound of the lengths": (
        toy_with(DiagonalOfTheBound, BoundsBuilder, cudagraph=CudaGraphSupport.NEVER),
        "W2",
    ),
    "NaN for a sink of -inf": (toy_with(SinkIsTheFirstMaximum), "L3"),
    "keys of the requests from 64 on": (toy_with(KeysOfLateRequests), "V2"),
    "workspace of 128 requests": (toy_with(WorkspaceOf128Requests), "W4"),
    "16 splits of 128 keys": (toy_with(SixteenSplits), "W4"),
    "query tokens from 64 on": (toy_with(ValuesOfLateRows), "V2"),
    "query tokens from 512 on": (toy_with(TileOfLateRows), "W4"),
    "window start by tile in long sequences": (toy_with(WindowByTile), "W4"),
    "ALiBi biases of 1024 distances": (toy_with(AlibiTableOf1024), "V2"),
    "values scaled by 1.004 in bfloat16": (toy_with(BiasedValues), "V2"),
    "results truncated to 16 bits": (toy_with(TruncatedOutput), "V2"),
    "weights truncated to 16 bits": (toy_with(TruncatedWeights), "V2"),
    "soft cap after the mask": (toy_with(SoftCapAfterMask), "W2"),
}
"""Error -> the wrong backend and the check that is meant to detect it."""
