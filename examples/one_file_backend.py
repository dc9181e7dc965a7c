"""A whole attention backend in one file: plain torch, one request at a time.

Run it as a program and it sits the exam:

    python examples/one_file_backend.py

It is meant to be read and copied: three small classes and a declaration are all that a backend is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from attnlib import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    Capabilities,
    CommonAttentionMetadata,
    MaskKind,
    PagedKVCache,
)
from attnlib.capabilities import Sizes


@dataclass(kw_only=True)
class LoopMetadata(AttentionMetadata):
    """What one batch looks like to this backend: lengths as plain numbers, the table as a tensor."""

    query_lens: list[int]
    seq_lens: list[int]
    block_table: (
        torch.Tensor
    )  # [R, max_blocks] int32; entries past a sequence's end are garbage (P3)

    @property
    def prefill_metadata(self) -> LoopMetadata | None:
        return self  # everything goes one way here

    @property
    def decode_metadata(self) -> LoopMetadata | None:
        return None  # and nothing the other


class LoopBuilder(AttentionMetadataBuilder[LoopMetadata]):
    """Once per batch: turn the common facts into ours."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> LoopMetadata:
        common = common_attn_metadata
        assert common.block_table_tensor is not None  # the declaration below admits decoders only
        return LoopMetadata(
            num_prefills=common.num_reqs,
            num_prefill_tokens=common.num_actual_tokens,
            num_decode_tokens=0,
            slot_mapping=common.slot_mapping,
            query_lens=common.query_lens_cpu.tolist(),
            seq_lens=common.seq_lens_cpu.tolist(),
            block_table=common.block_table_tensor,
        )


class LoopImpl(AttentionImpl):
    """Per layer: attend. Writing the cache is inherited."""

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: LoopMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        row = 0
        for request, (query_len, seq_len) in enumerate(
            zip(metadata.query_lens, metadata.seq_lens, strict=True)
        ):
            rows = slice(row, row + query_len)
            row += query_len
            out, denominator = self._attend(
                query[rows], cache, metadata.block_table[request], seq_len
            )
            output[rows] = out
            if lse is not None:
                lse[rows] = denominator
        output[row:] = 0  # M6: rows past the batch are exactly 0
        if lse is not None:
            lse[row:] = -torch.inf

    def _attend(
        self, query: torch.Tensor, cache: PagedKVCache, table: torch.Tensor, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One request: query [q, Hq, D] -> out [q, Hq, Dv] and LSE [q, Hq]."""
        position = torch.arange(seq_len, device=query.device)
        block, offset = table[position // cache.block_size].long(), position % cache.block_size
        keys = cache.key_cache[block, offset].float().repeat_interleave(self.spec.group_size, dim=1)
        values = (
            cache.value_cache[block, offset].float().repeat_interleave(self.spec.group_size, dim=1)
        )

        scores = self.scale * torch.einsum("qhd,khd->qhk", query.float(), keys)
        if self.spec.logits_soft_cap:
            scores = self.spec.logits_soft_cap * torch.tanh(scores / self.spec.logits_soft_cap)
        mine = (
            seq_len - query.shape[0] + torch.arange(query.shape[0], device=query.device)
        )  # M1: bottom-right
        visible = position[None, :] <= mine[:, None]
        if self.spec.visible_window.left is not None:
            visible &= (
                position[None, :] >= mine[:, None] - self.spec.visible_window.left
            )  # M2: W keys, own included
        scores = scores.masked_fill(~visible[:, None, :], -torch.inf)

        lse = (
            torch.logsumexp(scores, dim=-1)
            if seq_len
            else scores.new_full(query.shape[:2], -torch.inf)
        )
        weights = torch.exp(
            scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
        )  # M5: no key, output 0
        return torch.einsum("qhk,khd->qhd", weights, values).to(query.dtype), lse


class OneFileBackend(AttentionBackend):
    """The three of them together, and what they can do; whatever is not stated is refused."""

    description = "one request at a time, in plain torch"
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        kv_cache_dtypes=(torch.float32, torch.bfloat16, torch.float16),
        head_sizes=Sizes(1),
        head_size_v_may_differ=True,
        block_sizes=Sizes(1),
        kv_cache_layouts=("NHD", "HND", "ANY"),
        group_sizes=Sizes(1),
        attn_types=(AttentionType.DECODER,),
        mask_kinds=(MaskKind.CAUSAL,),
        sliding_window=True,
        logits_soft_cap=True,
        lse=True,
        kv_sharing=True,
    )

    @staticmethod
    def get_name() -> str:
        return "one_file"

    @staticmethod
    def get_impl_cls() -> type[LoopImpl]:
        return LoopImpl

    @staticmethod
    def get_metadata_cls() -> type[LoopMetadata]:
        return LoopMetadata

    @staticmethod
    def get_builder_cls() -> type[LoopBuilder]:
        return LoopBuilder


if __name__ == "__main__":
    from attnlib.testing import run_conformance

    report = run_conformance(OneFileBackend, label=f"{__file__}:OneFileBackend")
    print(report)
    sys.exit(0 if report.passed else 1)
