"""Latent caches (P10, M12): values that are a prefix of the keys are loaded and written once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlib.ops.latent import values_are_prefix
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.cache_write import write_kv
from attnlib.ops.triton.paged_decode import paged_decode
from attnlib.ops.triton.paged_prefill import paged_prefill
from tests.ops.naive import naive_attention

SIZES = [(576, 512), (96, 64), (72, 40), (64, 64), (48, 32)]
"""(D, Dv): the latents of DeepSeek, parts of other sizes, and no rotary part."""


def _batch(
    query_lens: list[int], seq_lens: list[int], heads: int, sizes: tuple[int, int],
    dtype: torch.dtype, device: torch.device, pad: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Query, latents as keys and values, block table, starts and lengths; unused slots hold NaN.

    Args:
        pad: elements between two tokens of the cache; 4 of them make rows unaligned.
    """
    draw, block = torch.Generator().manual_seed(3), 16
    blocks = [-(-length // block) for length in seq_lens]
    order = (torch.randperm(sum(blocks), generator=draw) + 1).tolist()
    table = torch.full((len(seq_lens), max(blocks) + 1), -7, dtype=torch.int32)
    rows = torch.full((sum(blocks) + 2, block, 1, sizes[0] + pad), float("nan"))
    for request, (count, length) in enumerate(zip(blocks, seq_lens, strict=True)):
        own = [order.pop() for _ in range(count)]
        table[request, :count] = torch.tensor(own, dtype=torch.int32)
        flat = torch.randn(length, 1, sizes[0], generator=draw)
        for index, block_id in enumerate(own):
            part = flat[index * block : (index + 1) * block]
            rows[block_id, : len(part), :, : sizes[0]] = part
    key = rows.to(device, dtype)[..., : sizes[0]]
    query = torch.randn(sum(query_lens), heads, sizes[0], generator=draw).to(device, dtype)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)], dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    value = key[..., : sizes[1]]
    return query, key, value, table.to(device), starts.to(device), lengths.to(device)


def _check(operation: Any, tensors: tuple[Tensor, ...], bounds: tuple[int, int], **options: Any):  # type: ignore[no-untyped-def]
    query, key, value = tensors[:3]
    assert values_are_prefix(key, value)
    out = torch.full((*query.shape[:2], value.shape[3]), float("nan")).to(query)
    lse = torch.full(query.shape[:2], float("nan"), device=query.device)
    num_splits = {"num_splits": options.pop("num_splits")} if "num_splits" in options else {}
    params = {"scale": 192**-0.5, **options}
    expected, expected_lse = naive_attention(*tensors, **params)
    operation(
        *tensors, AttentionParams(**params), max_query_len=bounds[0], max_seq_len=bounds[1],
        out=out, lse=lse, **num_splits,
    )  # fmt: skip
    tolerance = 2e-5 if query.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), expected.double(), rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_decodes_and_verification_steps(
    device: torch.device, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """P5, P10: 5 and 16 heads, one to three tokens, with and without splits."""
    for heads, query_lens in ((16, [1, 1]), (5, [3, 1])):
        tensors = _batch(query_lens, [70, 33], heads, sizes, dtype, device)
        for options in ({}, {"num_splits": 2}):
            _check(paged_decode, tensors, (max(query_lens), 70), **options)


@pytest.mark.parametrize("sizes", SIZES[:3])
def test_prefills(device: torch.device, sizes: tuple[int, int]) -> None:
    """P10: chunks over a context."""
    tensors = _batch([7, 20], [40, 33], 5, sizes, torch.float32, device)
    _check(paged_prefill, tensors, (20, 40))


@pytest.mark.parametrize("operation", [paged_decode, paged_prefill])
def test_features(device: torch.device, operation: Any) -> None:
    """M2, M3, M4: windows, soft caps and sinks over latents."""
    tensors = _batch([2, 3], [40, 33], 4, (96, 64), torch.float32, device)
    sinks = torch.linspace(-1, 2, 4, device=device)
    _check(operation, tensors, (3, 40), window=(9, 0), sinks=sinks, logits_soft_cap=2.0)


def test_rows_that_are_not_aligned(device: torch.device) -> None:
    """P9: rows of 580 elements in 16 bits do not start on 16-byte boundaries."""
    tensors = _batch([1, 1], [40, 33], 16, (576, 512), torch.float16, device, pad=4)
    _check(paged_decode, tensors, (1, 40))


def test_128_heads(device: torch.device) -> None:
    """Several blocks of heads share a latent."""
    tensors = _batch([1, 2], [40, 33], 128, (576, 512), torch.float16, device)
    _check(paged_decode, tensors, (2, 40))


@pytest.mark.parametrize("stored", [torch.float32, torch.float8_e4m3fn])
def test_one_write_stores_keys_and_values(device: torch.device, stored: torch.dtype) -> None:
    """P10: the values are not read; they may be anything."""
    key = torch.randn(5, 1, 96, device=device)
    cache = torch.zeros(2, 4, 1, 96, dtype=stored, device=device)
    slots = torch.tensor([3, -1, 6, 0, 1], device=device)
    nan = torch.full((5, 1, 64), float("nan"), device=device)
    write_kv(key, nan, cache, cache[..., :64], slots, k_scale=0.5, v_scale=0.5)
    expected = torch.zeros(8, 1, 96, device=device)
    kept = slots >= 0
    expected[slots[kept]] = key[kept] / (0.5 if stored.itemsize == 1 else 1.0)
    found = cache.float().view(8, 1, 96)
    torch.testing.assert_close(found, expected.to(stored).float(), rtol=0, atol=0)


def test_separate_values_of_the_same_sizes_are_another_launch(device: torch.device) -> None:
    """The launch key has the aliasing: dtypes, shapes and strides of the two calls are equal."""
    key = torch.randn(2, 1, 64, device=device)
    slots = torch.tensor([0, 1], device=device)
    both = torch.zeros(1, 4, 1, 64, device=device)
    apart = torch.zeros(1, 4, 1, 64, device=device)
    write_kv(key, -key, both, both, slots)
    write_kv(key, -key, both, apart, slots)
    assert torch.equal(apart[0, :2], -key) and torch.equal(both[0, :2], key)
