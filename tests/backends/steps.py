"""One step of one layer on the CPU and its expected outputs, for the tests of adapters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill
from attnlib.spec import AttentionSpec


@dataclass
class Step:
    """The tensors of one step."""

    spec: AttentionSpec
    cache: PagedKVCache
    common: CommonAttentionMetadata
    query: torch.Tensor

    def outputs(self, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """An output and an LSE filled with NaN, with `padding` rows past the batch."""
        rows = self.query.shape[0] + padding
        out = torch.full(
            (rows, self.spec.num_heads, self.spec.head_size_v), float("nan"), dtype=self.spec.dtype
        )
        return out, torch.full((rows, self.spec.num_heads), float("nan"))

    def expected(
        self,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
        spec: AttentionSpec | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of plain torch."""
        spec, query = spec or self.spec, self.query if query is None else query
        out = torch.empty(query.shape[0], spec.num_heads, spec.head_size_v, dtype=spec.dtype)
        lse = torch.empty(query.shape[0], spec.num_heads)
        table = self.common.block_table_tensor
        assert table is not None
        params = AttentionParams(
            scale=spec.head_size**-0.5 if scale is None else scale,
            causal=spec.is_causal if self.common.causal is None else self.common.causal,
            window=spec.visible_window.as_kernel_args(),
            logits_soft_cap=spec.logits_soft_cap or 0.0,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_scale=self.cache.k_scale,
            v_scale=self.cache.v_scale,
        )
        paged_prefill(
            query,
            self.cache.key_cache,
            self.cache.value_cache,
            table,
            self.common.query_start_loc,
            self.common.seq_lens,
            params,
            max_query_len=self.common.max_query_len,
            max_seq_len=self.common.max_seq_len,
            out=out,
            lse=lse,
        )
        return out, lse


def make_step(
    spec: AttentionSpec,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    seed: int = 0,
    padding: int = 0,
) -> Step:
    """A step with random keys and blocks in random order; q has `padding` rows past the batch."""
    generator = torch.Generator().manual_seed(seed)
    widest = max([-(-length // spec.block_size) for length in seq_lens], default=0)
    blocks = torch.randperm(max(widest * len(seq_lens), 1) + 2, generator=generator).to(torch.int32)
    table = blocks[: widest * len(seq_lens)].view(len(seq_lens), widest)
    cache = PagedKVCache.allocate(spec, num_blocks=len(blocks), device="cpu", layout="NHD")
    for view in (cache.key_cache, cache.value_cache):
        view.copy_(torch.randn(view.shape, generator=generator).to(view.dtype))
    common = CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, table, spec.block_size, "cpu"
    )
    rows = sum(query_lens) + padding
    query = torch.randn(rows, spec.num_heads, spec.head_size, generator=generator).to(spec.dtype)
    return Step(spec, cache, common, query)
