"""The conversion of pages to packed rows, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from attnlib import AttentionSpec, PagedKVCache
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.kv_rotation import KVRotation
from attnlib.ops.torch.cache_write import write_kv
from attnlib.ops.torch.hadamard import rotate_heads
from attnlib.ops.triton.kernels.convert_cache import CopiedSide, convert_cache_kernel
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
        BLOCK_SIZE=BLOCK_SIZE, TOKENS=8, KEYS=CopiedSide(D, 64, 1), VALUES=CopiedSide(DV, 32, 1),
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


def _convert(
    spec: AttentionSpec,
) -> tuple[PagedKVCache, list[torch.Tensor], list[torch.Tensor]]:
    """A cache with random tokens, their numbers as stored, and the copies of them."""
    torch.manual_seed(0)
    lengths, size = [19, 3], spec.head_size
    cache = PagedKVCache.allocate(spec, 7)
    table = torch.tensor([[6, 2, 4, 0, 1], [5, 9, 9, 9, 9]]).int()
    tokens = [torch.randn(28, HEADS, size).to(spec.dtype) for _ in range(2)]
    scales = cache.k_scale, cache.v_scale
    slots = torch.arange(28)
    write_kv(
        *tokens, cache.key_cache, cache.value_cache, slots, k_scale=scales[0], v_scale=scales[1],
        rotation=spec.kv_rotation,
    )  # fmt: skip
    views, formats = (cache.key_cache, cache.value_cache), (spec.kv_format, spec.value_format)
    outputs = [torch.zeros(22, HEADS, size, dtype=spec.dtype) for _ in views]
    signs = (0, 0) if spec.kv_rotation is None else spec.kv_rotation.sign_bits(size, size)
    sides = [
        CopiedSide(size, 128, 1, page_kind(stored), 0, *page_words(view, scale, stored), bits)
        for view, scale, stored, bits in zip(views, scales, formats, signs, strict=True)
    ]
    convert_cache_kernel[(2,)](
        *(view.view(torch.uint8) for view in views), *scales, *outputs,
        torch.zeros(3, dtype=torch.int32), torch.tensor(lengths).int(), table, 2, 22,
        table.stride(0), *views[0].stride()[:3], *views[1].stride()[:3], *scales[0].stride()[:3],
        *scales[1].stride()[:3], NUM_KV_HEADS=HEADS, BLOCK_SIZE=BLOCK_SIZE, TOKENS=8,
        KEYS=sides[0], VALUES=sides[1],
    )  # fmt: skip
    pages = table.long().clamp(max=6)
    stored = []
    for view, scale, one in zip(views, scales, formats, strict=True):
        rows = [
            dequantize_tokens(view[page], scale[page], one.name).flatten(0, 1)[:length]
            for page, length in zip(pages, lengths, strict=True)
        ]
        stored.append(torch.cat(rows))
    return cache, stored, outputs


@pytest.mark.parametrize("name", PAGE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pages_with_scales_are_multiplied(name: str, dtype: torch.dtype) -> None:
    """Elements times their scales, rounded once."""
    spec = AttentionSpec(
        num_heads=HEADS, num_kv_heads=HEADS, head_size=96, dtype=dtype, kv_cache_dtype=name,
        block_size=BLOCK_SIZE,
    )  # fmt: skip
    _, stored, outputs = _convert(spec)
    for expected, out in zip(stored, outputs, strict=True):
        # The interpreter truncates to bfloat16.
        bits = 7 if dtype == torch.bfloat16 else 10
        torch.testing.assert_close(out, expected.to(dtype), rtol=2**-bits, atol=1e-6)
        assert out.abs().sum(dim=(1, 2)).min() > 0


@pytest.mark.parametrize(
    ("values", "rotation"),
    [("int4_per_group", "hadamard@3"), ("nvfp4", "hadamard_values"), (None, "hadamard_keys")],
)
def test_rotated_pages_become_plain_rows(values: str | None, rotation: str) -> None:
    """P15: copies of rotated heads are rotated back in float32 and rounded once."""
    turned = KVRotation.of(rotation)
    assert turned is not None
    spec = AttentionSpec(
        num_heads=HEADS, num_kv_heads=HEADS, head_size=128, dtype=torch.float16,
        kv_cache_dtype="int8_per_token_head", value_cache_dtype=values, block_size=BLOCK_SIZE,
        kv_rotation=turned,
    )  # fmt: skip
    _, stored, outputs = _convert(spec)
    sides = (turned.keys, turned.values)
    for expected, out, rotates in zip(stored, outputs, sides, strict=True):
        if rotates:
            expected = rotate_heads(expected.float(), turned.seed, inverse=True)
        torch.testing.assert_close(out, expected.to(out.dtype), rtol=2**-10, atol=1e-6)
