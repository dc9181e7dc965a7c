"""The conversion of pages to packed rows, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from attnlib import AttentionSpec, PagedKVCache
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.ops.torch.cache_write import write_kv
from attnlib.ops.triton.kernels.convert_cache import NO_SCALES, convert_cache_kernel
from attnlib.ops.triton.quantized_pages import page_kind, page_words
from attnlib.testing.page_formats import dequantize_tokens

HEADS, D, DV, BLOCK_SIZE = 2, 64, 24, 4


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("spare", [5, -3])
def test_rows_are_packed(cache: torch.dtype, programs: int, spare: int) -> None:
    """All elements keep their values; rows past the copies are not written."""
    torch.manual_seed(0)
    lengths = [5, 0, 33, 16, 1]
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    order, table = torch.randperm(sum(blocks)).int(), torch.full((5, 10), 2**30).int()
    for row, count in enumerate(blocks):
        table[row, :count], order = order[:count], order[count:]
    key, value = (
        torch.randn(sum(blocks), HEADS, BLOCK_SIZE, size).to(cache).transpose(1, 2)
        for size in (D, DV)
    )
    rows = sum(lengths) + spare
    outputs = [torch.full((rows + 4, HEADS, size), 7.0, dtype=torch.float16) for size in (D, DV)]
    starts = torch.full((6,), -1, dtype=torch.int32)
    convert_cache_kernel[(programs,)](
        key, value, None, None, *outputs, starts, torch.tensor(lengths).int(), table, 5, rows,
        table.stride(0), *key.stride()[:3], *value.stride()[:3], *[None] * 6, NUM_KV_HEADS=HEADS,
        D=D, DV=DV, D_PAD=64, DV_PAD=32, WORDS=0, WORDS_PAD=0, DV_WORDS=0, DV_WORDS_PAD=0,
        BLOCK_SIZE=BLOCK_SIZE, KIND=NO_SCALES.value, PTX=0, VEC_K=1, VEC_V=1, TOKENS=8,
    )  # fmt: skip
    assert starts.tolist() == [0, 5, 5, 38, 54, 55]
    for view, out in zip((key, value), outputs, strict=True):
        expected = torch.cat(
            [
                view.float()[table[row, :count].long()].flatten(0, 1)[:length]
                for row, (count, length) in enumerate(zip(blocks, lengths, strict=True))
            ]
        )[:rows]
        torch.testing.assert_close(out[: len(expected)].float(), expected, rtol=0, atol=0)
        assert (out[rows:] == 7.0).all()


@pytest.mark.parametrize("name", PAGE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pages_with_scales_are_multiplied(name: str, dtype: torch.dtype) -> None:
    """Elements times their scales, rounded once."""
    torch.manual_seed(0)
    stored, lengths, size = PAGE_FORMATS[name], [19, 3], 96
    spec = AttentionSpec(
        num_heads=HEADS, num_kv_heads=HEADS, head_size=size, dtype=dtype, kv_cache_dtype=name,
        block_size=BLOCK_SIZE,
    )  # fmt: skip
    cache = PagedKVCache.allocate(spec, 7)
    table = torch.tensor([[6, 2, 4, 0, 1], [5, 9, 9, 9, 9]]).int()
    tokens = [torch.randn(28, HEADS, size).to(dtype) for _ in range(2)]
    scales = cache.k_scale, cache.v_scale
    slots = torch.arange(28)
    write_kv(
        *tokens, cache.key_cache, cache.value_cache, slots, k_scale=scales[0], v_scale=scales[1]
    )
    views = cache.key_cache, cache.value_cache
    outputs = [torch.zeros(22, HEADS, size, dtype=dtype) for _ in views]
    words, padded = page_words(views[0], scales[0], stored)
    convert_cache_kernel[(2,)](
        *(view.view(torch.uint8) for view in views), *scales, *outputs,
        torch.zeros(3, dtype=torch.int32), torch.tensor(lengths).int(), table, 2, 22,
        table.stride(0), *views[0].stride()[:3], *views[1].stride()[:3], *scales[0].stride()[:3],
        *scales[1].stride()[:3], NUM_KV_HEADS=HEADS, D=size, DV=size, D_PAD=128, DV_PAD=128,
        WORDS=words, WORDS_PAD=padded, DV_WORDS=words, DV_WORDS_PAD=padded, BLOCK_SIZE=BLOCK_SIZE,
        KIND=page_kind(stored), PTX=0, VEC_K=1, VEC_V=1, TOKENS=8,
    )  # fmt: skip
    for view, scale, out in zip(views, scales, outputs, strict=True):
        rows = [
            (dequantize_tokens(view[pages], scale[pages])).flatten(0, 1)[:length]
            for pages, length in zip(table.long().clamp(max=6), lengths, strict=True)
        ]
        # The interpreter truncates to bfloat16.
        bits = 7 if dtype == torch.bfloat16 else 10
        torch.testing.assert_close(out, torch.cat(rows).to(dtype), rtol=2**-bits, atol=1e-6)
        assert out.abs().sum(dim=(1, 2)).min() > 0
