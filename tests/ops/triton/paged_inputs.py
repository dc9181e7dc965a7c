"""Paged batches for the tests of the Triton kernels, with poisoned memory.

Everything that a kernel must not use is invalid: NaN in cache elements outside a request's
positions (P5), huge ids in table entries past its last block (P3), NaN in output buffers. Every
parity test is therefore also a poison test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.calls import call_operation
from tests.ops.naive import naive_attention

__all__ = ["BF16", "DTYPES", "LAYOUTS", "PagedBatch", "assert_close", "make_batch", "make_cache"]

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu, id="bf16")
DTYPES = [pytest.param(torch.float32, id="f32"), pytest.param(torch.float16, id="f16"), BF16]
LAYOUTS = ["nhd", "hnd", "packed", "interleaved", "block_last"]
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "out") -> None:
    """|actual - expected| <= tol * (1 + |expected|), infinities equal, no NaN."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    assert not actual.isnan().any(), f"{what} has NaN"
    infinite = expected.isinf()
    assert torch.equal(actual.isinf(), infinite) and torch.equal(
        actual[infinite], expected[infinite]
    ), what
    error = ((actual - expected).abs() / (1 + expected.abs()))[~infinite]
    worst = float(error.max()) if error.numel() else 0.0
    assert worst <= _TOLERANCE[dtype], (
        f"{what} is off by {worst:.3g}, limit {_TOLERANCE[dtype]:.3g}"
    )


def make_cache(
    layout: str,
    blocks: int,
    block_size: int,
    heads: int,
    d: int,
    dv: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return key and value views [B, N, Hkv, D] and [B, N, Hkv, Dv] of a memory order, all NaN."""

    def poison(*shape: int) -> Tensor:
        if dtype in _FP8:
            return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    if layout == "nhd":
        return poison(blocks, block_size, heads, d), poison(blocks, block_size, heads, dv)
    if layout == "hnd":
        key, value = poison(blocks, heads, block_size, d), poison(blocks, heads, block_size, dv)
        return key.transpose(1, 2), value.transpose(1, 2)
    if layout == "packed":
        both = poison(blocks, block_size, heads, d + dv)
        return both[..., :d], both[..., d:]
    if layout == "interleaved":
        both = poison(blocks, 2, block_size, heads, max(d, dv))
        return both[:, 0, ..., :d], both[:, 1, ..., :dv]
    if layout == "block_last":
        return poison(block_size, heads, blocks, d).permute(2, 0, 1, 3), poison(
            heads, block_size, blocks, dv
        ).permute(2, 1, 0, 3)
    raise ValueError(layout)


@dataclass
class PagedBatch:
    """One batch, and how to run a kernel and the reference on it."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_actual_tokens: int
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
        )

    def run(self, kernel: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) of a kernel, from buffers full of NaN."""
        tokens, heads, _ = self.query.shape
        out = torch.full(
            (tokens, heads, self.value_cache.shape[3]),
            float("nan"),
            dtype=self.query.dtype,
            device=self.query.device,
        )
        lse = torch.full(
            (tokens, heads), float("nan"), dtype=torch.float32, device=self.query.device
        )
        call_operation(
            kernel, *self.tensors(), **{**self.options, "out": out, "lse": lse, **options}
        )
        return out, lse

    def expected(self, **options: Any) -> tuple[Tensor, Tensor]:
        return naive_attention(*self.tensors(), **{**self.options, **options})

    def check(
        self, kernel: Any, expected: tuple[Tensor, Tensor] | None = None, **options: Any
    ) -> None:
        """Check a kernel against the reference, which ignores options of the kernel."""
        out, lse = self.run(kernel, **options)
        want_out, want_lse = expected if expected is not None else self.expected(**options)
        assert_close(out, want_out, self.query.dtype, "out")
        assert_close(lse, want_lse, self.query.dtype, "lse")
        assert torch.equal(
            out[self.num_actual_tokens :], torch.zeros_like(out[self.num_actual_tokens :])
        )


def make_batch(
    device: torch.device,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    d: int = 32,
    dv: int = 0,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    layout: str = "nhd",
    padding: int = 0,
    seed: int = 0,
    **options: Any,
) -> PagedBatch:
    """A batch with random contents at random blocks.

    Args:
        query_lens: query tokens per request.
        seq_lens: positions per request, context and queries.
        padding: query rows after the last request.
        options: passed to every run, beside a scale and the bounds.
    """
    generator = torch.Generator().manual_seed(seed)
    dv = dv or d
    cache_dtype = cache_dtype or dtype
    used = [-(-length // block_size) for length in seq_lens]
    blocks = sum(used) + 2
    key_cache, value_cache = make_cache(
        layout, blocks, block_size, kv_heads, d, dv, cache_dtype, device
    )
    order = torch.randperm(blocks, generator=generator).tolist()
    table = torch.full((len(seq_lens), max(used, default=0) + 1), 1 << 30, dtype=torch.int32)
    for request, length in enumerate(seq_lens):
        for index in range(used[request]):
            block = order.pop()
            table[request, index] = block
            inside = min(block_size, length - index * block_size)
            for cache, size in ((key_cache, d), (value_cache, dv)):
                content = torch.randn(inside, kv_heads, size, generator=generator)
                cache[block, :inside] = content.to(cache_dtype).to(device)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    tokens = int(starts[-1])
    query = torch.randn(tokens + padding, heads, d, generator=generator).to(dtype).to(device)
    options = {
        "scale": d**-0.5,
        "max_query_len": max([*query_lens, 1]),
        "max_seq_len": max([*seq_lens, 1]),
        **options,
    }
    return PagedBatch(
        query, key_cache, value_cache, table.to(device), starts.to(device),
        torch.tensor(seq_lens, dtype=torch.int32).to(device), tokens, options,
    )  # fmt: skip
