"""A fake of FlashMLA: the signatures and pitfalls of its dense kernel, computed by plain torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill

__all__ = ["Calls", "install"]


class Calls:
    """The shapes of the queries of the calls, the addresses of queries and outputs (None where none
    was given), and how often a batch was planned."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.queries: list[int] = []
        self.outputs: list[int | None] = []
        self.plans = 0

    def get_mla_metadata(self, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        """The old arguments are accepted and ignored, as by the real function."""
        self.plans += 1
        return object(), None

    def flash_mla_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: Any,
        num_splits: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, S, Hq, Dv] and LSE [B, Hq, S], which is +inf for rows without keys. Only the
        build of vLLM has `out`."""
        assert q.dtype == k_cache.dtype and q.is_contiguous() and num_splits is None
        assert k_cache.shape[1:] == (64, 1, 576) and head_dim_v == 512
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        assert bool((cache_seqlens > 0).all())
        batch, count, heads, _ = q.shape
        self.shapes.append((batch, count))
        self.queries.append(q.data_ptr())
        self.outputs.append(None if out is None else out.data_ptr())
        shape = (batch, 1, count * heads, head_dim_v)
        assert out is None or (out.shape == shape and out.is_contiguous())
        out = torch.empty(shape, dtype=q.dtype) if out is None else out
        lse = torch.empty(batch * count, heads)
        paged_prefill(
            q.flatten(0, 1), k_cache, k_cache[..., :head_dim_v], block_table,
            torch.arange(0, batch * count + 1, count, dtype=torch.int32), cache_seqlens,
            AttentionParams(scale=float(softmax_scale or 576**-0.5), causal=causal),
            max_query_len=count, max_seq_len=int(cache_seqlens.max()),
            out=out.view(-1, heads, head_dim_v), lse=lse,
        )  # fmt: skip
        lse = torch.where(lse.isneginf(), torch.inf, lse)
        return out.view(batch, count, heads, -1), lse.view(batch, count, heads).transpose(1, 2)


def install(monkeypatch: pytest.MonkeyPatch, takes_out: bool = True) -> Calls:
    """Install the fake as `flash_mla` for one test.

    Args:
        takes_out: its function has `out`.
    """
    calls = Calls()
    module: Any = ModuleType("flash_mla")
    module.get_mla_metadata = calls.get_mla_metadata
    call = calls.flash_mla_with_kvcache

    def without_out(
        q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: Any,
        tile_scheduler_metadata: Any, num_splits: Any = None, softmax_scale: Any = None,
        causal: Any = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        return call(
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
            softmax_scale, causal,
        )  # fmt: skip

    module.flash_mla_with_kvcache = call if takes_out else without_out
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    return calls
