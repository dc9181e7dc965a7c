"""Paged batches for tests: shuffled blocks, strided caches, NaN in everything unused."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.ops.calls import call_operation
from tests.ops.naive import naive_attention

__all__ = ["LAYOUTS", "PagedCase", "make_case"]

LAYOUTS = ("NHD", "HND", "interleaved", "packed", "alias")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class PagedCase:
    """Arguments of one paged call, without `out` and `lse`."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    kwargs: dict[str, Any]
    extra_rows: int = 0
    expected: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = naive_attention(*self.tensors, **self.kwargs)

    @property
    def query(self) -> Tensor:
        return self.tensors[0]

    def run(self, operation: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Call a paged operation with outputs filled with NaN; returns (out, lse)."""
        num_tokens, num_heads, _ = self.query.shape
        out = torch.full(
            (num_tokens, num_heads, self.tensors[2].shape[3]), float("nan"), dtype=self.query.dtype
        )
        lse = torch.full((num_tokens, num_heads), float("nan"), dtype=torch.float32)
        call_operation(operation, *self.tensors, **self.kwargs, out=out, lse=lse, **more)
        return out, lse

    def check(self, operation: Any, tolerance: float = 2e-5, **more: Any) -> None:
        """Compare with the float64 reference; the LSE always with float32 accuracy."""
        out, lse = self.run(operation, **more)
        torch.testing.assert_close(out.double(), self.expected[0], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse.double(), self.expected[1], atol=2e-5, rtol=2e-5)


def make_case(
    query_lens: tuple[int, ...] = (1, 3, 6),
    seq_lens: tuple[int, ...] = (9, 3, 14),
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    head_size_v: int | None = None,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    layout: str = "NHD",
    contiguous_pages: bool = False,
    extra_rows: int = 0,
    seed: int = 0,
    **kwargs: Any,
) -> PagedCase:
    """A batch with NaN or Inf in unused cache elements and invalid unused block ids (P3, P5)."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(pages) + 3
    shape = (num_blocks, block_size, num_kv_heads)
    key_cache, value_cache = _caches(
        shape, head_size, head_size_v or head_size, cache_dtype or dtype, layout
    )
    ids = (
        torch.arange(num_blocks)
        if contiguous_pages
        else torch.randperm(num_blocks, generator=generator)
    )
    table = torch.full((len(seq_lens), max(pages, default=0) + 2), 2**31 - 1, dtype=torch.int32)
    table[:, -1] = -1
    begin = 0
    for request, (count, seq_len) in enumerate(zip(pages, seq_lens, strict=True)):
        table[request, :count] = ids[begin : begin + count]
        for position in range(seq_len):
            block = int(table[request, position // block_size])
            for cache in (key_cache, value_cache):
                values = torch.randn(num_kv_heads, cache.shape[3], generator=generator)
                cache[block, position % block_size] = values.to(cache.dtype)
        begin += count
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    num_tokens = int(starts[-1]) + extra_rows
    query = torch.randn(num_tokens, num_heads, head_size, generator=generator).to(dtype)
    kwargs = {
        "max_query_len": max(query_lens, default=0),
        "max_seq_len": max(seq_lens, default=0),
        "scale": head_size**-0.5,
        **kwargs,
    }
    tensors = (
        query,
        key_cache,
        value_cache,
        table,
        starts,
        torch.tensor(seq_lens, dtype=torch.int32),
    )
    return PagedCase(tensors, kwargs, extra_rows)


def _caches(
    shape: tuple[int, int, int], head_size: int, head_size_v: int, dtype: torch.dtype, layout: str
) -> tuple[Tensor, Tensor]:
    num_blocks, block_size, num_heads = shape
    if layout == "HND":
        sides = [
            torch.empty(num_blocks, num_heads, block_size, size, dtype=dtype)
            for size in (head_size, head_size_v)
        ]
        key_cache, value_cache = (side.transpose(1, 2) for side in sides)
    elif layout == "interleaved":
        whole = torch.empty(num_blocks, 2, block_size, num_heads, head_size, dtype=dtype)
        key_cache, value_cache = whole[:, 0], whole[:, 1]
    elif layout == "packed":
        whole = torch.empty(
            num_blocks, num_heads, block_size, head_size + head_size_v, dtype=dtype
        ).transpose(1, 2)
        key_cache, value_cache = whole[..., :head_size], whole[..., head_size:]
    elif layout == "alias":
        key_cache = torch.empty(*shape, head_size, dtype=dtype)
        value_cache = key_cache[..., :head_size_v]
    else:
        key_cache, value_cache = (
            torch.empty(*shape, size, dtype=dtype) for size in (head_size, head_size_v)
        )
    for cache, fill in (
        (key_cache, float("nan")),
        (value_cache, float("nan") if dtype in _FP8 else float("inf")),
    ):
        cache.copy_(torch.full(cache.shape, fill).to(dtype))
    return key_cache, value_cache
