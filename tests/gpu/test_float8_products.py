"""Prefills with float8 queries and products (M19) equal attention in float32 over rounded queries,
up to the rounding of the weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill as reference_attention
from tests.gpu.devices import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="needs compute capability 9.0",
    ),
]

HEADS, SIZE, DEVICE, E4M3 = 8, 128, "cuda", torch.float8_e4m3fn
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "page128-scales": {"block_size": 128, "k_scale": 0.5, "v_scale": 0.25},
    "head-scales": {"k_scale": "heads", "v_scale": "heads"},
    "fp16": {"dtype": torch.float16},
    "one-head": {"group": 8, "heads": 1},
    "window": {"left": 300},
    "not-causal": {"causal": False},
    "large-queries": {"magnitude": 1e5, "scale": 1e-6},
    "no-queries": {"query_lens": [130, 0, 64], "seq_lens": [130, 50, 999]},
    "empty-rows": {"rows_after": 40},
}


def _inputs(
    query_lens: list[int],
    seq_lens: list[int],
    block_size: int,
    heads: int,
    group: int,
    dtype: torch.dtype,
    magnitude: float,
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """(queries, caches, block table); unused elements of the caches are NaN."""
    pages = [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(pages) + 1).int()
    table = torch.zeros(len(pages), max(pages)).int()
    caches = [
        torch.full((sum(pages) + 1, block_size, heads, SIZE), float("nan"), device=DEVICE).to(E4M3)
        for _ in range(2)
    ]
    for row, (count, length) in enumerate(zip(pages, seq_lens, strict=True)):
        table[row, :count], order = order[:count], order[count:]
        position = torch.arange(length)
        block = table[row, position // block_size].long().to(DEVICE)
        for cache in caches:
            found = torch.randn(length, heads, SIZE, device=DEVICE).to(E4M3)
            cache.view(torch.uint8)[block, (position % block_size).to(DEVICE)] = found.view(
                torch.uint8
            )
    query = torch.randn(sum(query_lens), heads * group, SIZE, device=DEVICE) * magnitude
    return query.to(dtype), caches, table.to(DEVICE)


def _rounded(query: torch.Tensor) -> torch.Tensor:
    """Queries rounded to e4m3 with a power of two for each row, in float32."""
    scale = (query.float().abs().amax(-1, keepdim=True).log2().floor() - 7).exp2()
    return (query.float() / scale).to(E4M3).float() * scale


@pytest.mark.parametrize("name", CASES)
def test_prefill_equals_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlib.ops.triton.hopper import sizes
    from attnlib.ops.triton.launch.cache import LAUNCHES
    from attnlib.ops.triton.paged_prefill import paged_prefill

    options = dict(CASES[name])
    heads, group = options.get("heads", HEADS), options.get("group", 4)
    query_lens = options.get("query_lens", [500, 70, 129])
    seq_lens = options.get("seq_lens", [1300, 70, 1000])
    dtype, rows_after = options.get("dtype", torch.bfloat16), options.get("rows_after", 0)
    monkeypatch.setattr(sizes, "COPIED_TOKENS", 1)
    LAUNCHES.clear()
    torch.manual_seed(0)
    query, caches, table = _inputs(
        query_lens, seq_lens, options.get("block_size", 16), heads, group, dtype,
        options.get("magnitude", 1.0),
    )  # fmt: skip
    left, causal = options.get("left", -1), options.get("causal", True)
    scales = {
        side: torch.rand(heads, device=DEVICE) + 0.5 if given == "heads" else given
        for side in ("k_scale", "v_scale")
        for given in [options.get(side, 1.0)]
    }
    params = AttentionParams(
        scale=options.get("scale", SIZE**-0.5), causal=causal,
        window=(left, 0 if left >= 0 else -1), allow_fp8_queries=True, **scales,
    )  # fmt: skip
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], device=DEVICE).int()
    batch = (table, starts, torch.tensor(seq_lens, device=DEVICE).int())
    bounds = {"max_query_len": max(query_lens), "max_seq_len": max(seq_lens)}
    exact = _rounded(query)
    expected, expected_lse = torch.empty_like(exact), torch.empty(exact.shape[:2], device=DEVICE)
    reference_attention(
        exact, *caches, *batch, dataclasses.replace(params, allow_fp8_queries=False), **bounds,
        out=expected, lse=expected_lse,
    )  # fmt: skip
    query = torch.cat([query, query.new_full((rows_after, *query.shape[1:]), float("nan"))])
    for _ in range(2):  # launched by Triton, then directly
        out = torch.full_like(query, float("nan"))
        lse = torch.full(query.shape[:2], float("nan"), device=DEVICE)
        paged_prefill(query, *caches, *batch, params, **bounds, out=out, lse=lse)
        tokens = len(exact)
        error = (out[:tokens].float() - expected).norm() / expected.norm()
        assert error < 0.03, error
        torch.testing.assert_close(lse[:tokens], expected_lse, atol=2e-3, rtol=1e-5)
        assert (out[tokens:] == 0).all() and (lse[tokens:] == float("-inf")).all()
    assert any(type(value).__name__ == "ConvertedPrefill" for value in LAUNCHES.values())
    LAUNCHES.clear()


@pytest.mark.parametrize("fault", ["k_scale", "value"])
def test_nan_is_not_hidden(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale out of range, or a stored NaN, reaches the rows that see it."""
    from attnlib.ops.triton.hopper import sizes
    from attnlib.ops.triton.launch.cache import LAUNCHES
    from attnlib.ops.triton.paged_prefill import paged_prefill

    monkeypatch.setattr(sizes, "COPIED_TOKENS", 1)
    LAUNCHES.clear()
    torch.manual_seed(0)
    query, caches, table = _inputs([200, 100], [300, 100], 16, HEADS, 4, torch.bfloat16, 1.0)
    scale = torch.ones(HEADS, device=DEVICE)
    if fault == "k_scale":
        scale[2] = 0.0
    else:
        caches[1].view(torch.uint8)[table[0, 0], 3, 2, 5] = 0x7F
    params = AttentionParams(scale=SIZE**-0.5, allow_fp8_queries=True, k_scale=scale)
    starts = torch.tensor([0, 200, 300], device=DEVICE).int()
    out = torch.empty_like(query)
    paged_prefill(
        query, *caches, table, starts, torch.tensor([300, 100], device=DEVICE).int(), params,
        max_query_len=200, max_seq_len=300, out=out,
    )  # fmt: skip
    found = out.view(300, HEADS, 4, SIZE).isnan()
    assert found[:200, 2, :, 5].all()
    assert not found[:, [0, 1, 3, 4, 5, 6, 7]].any()
    if fault == "value":
        assert not found[200:].any()
    LAUNCHES.clear()


def test_retrieval_from_128k_keys() -> None:
    """The value of one key that stands out is found among 131072 keys."""
    from attnlib.ops.triton.hopper import sizes
    from attnlib.ops.triton.launch.cache import LAUNCHES
    from attnlib.ops.triton.paged_prefill import paged_prefill

    LAUNCHES.clear()
    torch.manual_seed(1)
    length, tokens, heads = 131072, sizes.COPIED_TOKENS, 2
    key, value = (torch.randn(length, heads, SIZE, device=DEVICE).to(E4M3) for _ in range(2))
    pages = torch.randperm(length // 16, device=DEVICE)
    caches = []
    for rows in (key, value):
        cache = torch.empty(length // 16, 16, heads, SIZE, dtype=E4M3, device=DEVICE)
        cache.view(torch.uint8)[pages] = rows.view(torch.uint8).view(-1, 16, heads, SIZE)
        caches.append(cache)
    needles = torch.randint(0, length - tokens, (tokens,), device=DEVICE)
    query = (key.float()[needles] * 2.0).repeat_interleave(2, 1).bfloat16()
    out = torch.empty_like(query)
    params = AttentionParams(scale=SIZE**-0.5, allow_fp8_queries=True)
    paged_prefill(
        query, *caches, pages.int().view(1, -1), torch.tensor([0, tokens], device=DEVICE).int(),
        torch.tensor([length], device=DEVICE).int(), params, max_query_len=tokens,
        max_seq_len=length, out=out,
    )  # fmt: skip
    assert any(type(found).__name__ == "ConvertedPrefill" for found in LAUNCHES.values())
    expected = value.float()[needles].repeat_interleave(2, 1)
    similarity = torch.nn.functional.cosine_similarity(out.float(), expected, dim=-1)
    print(f"needles found: {(similarity > 0.95).float().mean():.4f} of {tokens}")
    assert (similarity > 0.95).float().mean() > 0.99, similarity.min()
    LAUNCHES.clear()
