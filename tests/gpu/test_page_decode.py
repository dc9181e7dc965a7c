"""The Hopper decode over pages that hold their scales equals attention in float32 over the same
pages (M16)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.cache_write import write_kv
from attnlib.ops.torch.paged_prefill import paged_prefill as reference_attention
from attnlib.ops.triton.hopper.sizes import DECODED_PAIRS
from attnlib.spec import AttentionSpec
from tests.gpu.devices import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="needs compute capability 9.0",
    ),
]

HEADS, DEVICE = 8, "cuda"
LENGTHS = [1000, 9, 3077, 25, 2048, 640]
INT8, FP8, INT4 = "int8_per_token_head", "fp8_per_token_head", "int4_per_group"
FLOAT4 = ("nvfp4", "mxfp4")
FORMATS = (INT8, FP8, INT4, *DECODED_PAIRS, *FLOAT4)
SIZES: dict[str, dict[str, Any]] = {
    "head64-sinks": {"head_size": 64, "group": 8, "sinks": True},
    "head96": {"head_size": 96},
    "head256-cap": {"head_size": 256, "group": 2, "cap": 30.0},
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "page128": {"block_size": 128, "group": 8},
    "tokens-first": {"layout": "NHD_INTERLEAVED"},
    "fp16": {"dtype": torch.float16},
    "group5-sinks": {"group": 5, "sinks": True},
    "cap": {"cap": 30.0},
    "verify": {"query_len": 4},
    "most-rows": {"query_len": 8, "group": 8},
    "mqa": {"group": 32},
    "window": {"left": 300},
    "many": {"lengths": [1 + 37 * index % 900 for index in range(200)]},
    "large-queries": {"magnitude": 1e6, "scale": 1e-6},
    "small-queries": {"magnitude": 1e-30, "scale": 1e-2},
    "unequal-scales": {"spread": 12},
}


def _formats(name: str) -> dict[str, str | None]:
    """The fields of a spec for a format, or for those of keys and values."""
    keys, _, values = name.partition(",")
    return {"kv_cache_dtype": keys, "value_cache_dtype": values or None}


def _run(
    name: str,
    *,
    lengths: list[int] = LENGTHS,
    query_len: int = 1,
    head_size: int = 128,
    group: int = 4,
    block_size: int = 16,
    layout: str = "HND_INTERLEAVED",
    dtype: torch.dtype = torch.bfloat16,
    sinks: bool = False,
    cap: float = 0.0,
    left: int = -1,
    magnitude: float = 1.0,
    scale: float | None = None,
    spread: int = 0,
    nan: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (output, LSE) of the decode, and those of the reference in float32.

    Args:
        spread: magnitudes of tokens are powers of two up to plus and minus this exponent.
        nan: "key" or "value" has a NaN in the last token of the first request.
    """
    from attnlib.ops.triton.paged_decode import paged_decode

    torch.manual_seed(0)
    lengths = [max(length, query_len) for length in lengths]
    spec = AttentionSpec(
        num_heads=HEADS * group, num_kv_heads=HEADS, head_size=head_size, dtype=dtype,
        block_size=block_size, **_formats(name),  # type: ignore[arg-type]
    )  # fmt: skip
    pages = [-(-length // block_size) for length in lengths]
    order, table = torch.randperm(sum(pages)).int(), torch.zeros(len(pages), max(pages)).int()
    cache = PagedKVCache.allocate(spec, sum(pages), DEVICE, layout=layout)
    assert cache.pages is not None
    cache.pages.fill_(0x7F)  # NaN as an element or a scale, or a large integer
    slots = []
    for row, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        table[row, :count], order = order[:count], order[count:]
        position = torch.arange(length)
        slots.append(table[row, position // block_size].long() * block_size + position % block_size)
    tokens = sum(lengths)
    exponents = torch.randint(-spread, spread + 1, (2, tokens, HEADS, 1)).float()
    exponents[0] /= 4  # scores that do not make one key dominate
    key, value = torch.randn(2, tokens, HEADS, head_size) * exponents.exp2()
    value[3] = 0.0  # a scale of 0
    if nan:
        (key if nan == "key" else value)[lengths[0] - 1, 2, 3] = float("nan")
    written = (key.to(DEVICE, dtype), value.to(DEVICE, dtype))
    write_kv(
        *written, cache.key_cache, cache.value_cache, torch.cat(slots).to(DEVICE),
        k_scale=cache.k_scale, v_scale=cache.v_scale,
    )  # fmt: skip
    starts = torch.arange(len(lengths) + 1).int() * query_len
    query = torch.randn(int(starts[-1]), HEADS * group, head_size) * magnitude
    query = query.to(DEVICE, dtype)
    params = AttentionParams(
        scale=head_size**-0.5 if scale is None else scale,
        causal=True,
        window=(left, 0 if left >= 0 else -1),
        logits_soft_cap=cap,
        sinks=torch.randn(HEADS * group, device=DEVICE) if sinks else None,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
    )
    batch = (table.to(DEVICE), starts.to(DEVICE), torch.tensor(lengths, device=DEVICE).int())
    bounds = {"max_query_len": query_len, "max_seq_len": max(lengths)}
    results = []
    for attend, rows in ((paged_decode, query), (reference_attention, query.float())):
        out, lse = torch.empty_like(rows), torch.empty(rows.shape[:2], device=DEVICE)
        chosen: dict[str, Any] = {"kernels": "hopper"} if attend is paged_decode else {}
        caches = (cache.key_cache, cache.value_cache)
        attend(rows, *caches, *batch, params, **bounds, out=out, lse=lse, **chosen)
        results += [out.float(), lse]
    return results[0], results[1], results[2], results[3]


def _uses(kind: str) -> bool:
    from attnlib.ops.triton.launch.cache import LAUNCHES

    return any(type(value).__name__ == kind for value in LAUNCHES.values())


def _choose_tile(monkeypatch: pytest.MonkeyPatch, warps: int) -> None:
    """Select CTAs of one warp, so many on a multiprocessor, or (0) of warpgroups."""
    from attnlib.ops.triton.heuristics.hopper_decode_tiles import (
        DecodeTile,
        choose_hopper_decode_tile,
    )
    from attnlib.ops.triton.hopper import select_decodes
    from attnlib.ops.triton.launch.cache import LAUNCHES

    def choose(*sizes: int, one_warp: bool = False, **work: Any) -> DecodeTile:
        assert one_warp or not warps
        if warps:
            return DecodeTile(32, 3, warps=warps)
        return choose_hopper_decode_tile(*sizes, **work)

    monkeypatch.setattr(select_decodes, "choose_hopper_decode_tile", choose)
    LAUNCHES.clear()


_READ = [(name, warps) for name in FORMATS for warps in (0, 8) if warps or name not in FLOAT4]
_ALL = [
    (name, case)
    for name in FORMATS
    for case in (*CASES, *SIZES)
    if name in (INT8, FP8) or case not in ("mqa", "most-rows", *SIZES)
]


_ONE_WARP = [
    (name, case, 8)
    for name, case in _ALL
    if case not in ("verify", "most-rows", "mqa", "head96", "head256-cap")
]


@pytest.mark.parametrize(
    ("name", "case", "warps"),
    [*((name, case, 0) for name, case in _ALL if name not in FLOAT4), *_ONE_WARP],
)
def test_decode_equals_float32(
    name: str, case: str, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**CASES, **SIZES}[case]
    _choose_tile(monkeypatch, warps)
    out, lse, expected, expected_lse = _run(name, **options)
    assert _uses("HopperDecode")
    error = (out - expected).norm() / expected.norm()
    assert error < (1e-3 if options.get("dtype") == torch.float16 else 3e-3), error
    torch.testing.assert_close(lse, expected_lse, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize(("name", "warps"), _READ)
def test_nan_reaches_the_rows_that_see_it(
    name: str, which: str, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _choose_tile(monkeypatch, warps)
    out, _, _, _ = _run(name, nan=which)
    rows = out[0].view(HEADS, -1)
    poisoned = rows[2].isnan()
    assert poisoned.all() if which == "key" else poisoned.any()
    assert not rows[[0, 1, 3, 4, 5, 6, 7]].isnan().any()
    assert not out[1:].isnan().any()


@pytest.mark.parametrize(("name", "warps"), _READ)
def test_layers_use_the_hopper_decode(
    name: str, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when calls are repeated, which launch without Triton."""
    from attnlib import Attention, CommonAttentionMetadata

    _choose_tile(monkeypatch, warps)
    torch.manual_seed(0)
    spec = AttentionSpec(
        num_heads=HEADS * 4, num_kv_heads=HEADS, head_size=128, dtype=torch.bfloat16,
        **_formats(name),  # type: ignore[arg-type]
    )  # fmt: skip
    lengths = [1000, 300, 2048]
    table = torch.randperm(3 * 128).int().view(3, 128)
    common = CommonAttentionMetadata.from_lengths([1] * 3, lengths, table, 16, DEVICE)
    cache = PagedKVCache.allocate(spec, 3 * 128, DEVICE)
    old = torch.randn(2, 3 * 2048, HEADS, 128, device=DEVICE).bfloat16()
    slots = torch.arange(3 * 2048, device=DEVICE)
    write_kv(
        *old, cache.key_cache, cache.value_cache, slots, k_scale=cache.k_scale,
        v_scale=cache.v_scale,
    )  # fmt: skip
    query = torch.randn(3, HEADS * 4, 128, device=DEVICE).bfloat16()
    results = []
    for backend in ("torch", "triton"):
        layer = Attention(spec, backend=backend, device=DEVICE)
        metadata = layer.backend.make_builder(spec, torch.device(DEVICE)).build(0, common)
        for _ in range(3):
            results.append(layer(query, None, None, cache, metadata).float())
    assert _uses("HopperDecode")
    for result in results[3:]:
        assert (result - results[0]).norm() / results[0].norm() < 3e-3


@pytest.mark.parametrize("warps", [0, 8])
def test_needle_at_128k_keys(warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of one key that stands out is found among 131072 keys, in each format."""
    from attnlib.ops.triton.paged_decode import paged_decode

    _choose_tile(monkeypatch, warps)
    length, size = 131072, 128
    for name in (name for name, read_by in _READ if read_by == warps):
        torch.manual_seed(1)
        spec = AttentionSpec(
            num_heads=HEADS * 4, num_kv_heads=HEADS, head_size=size, dtype=torch.bfloat16,
            block_size=16, **_formats(name),  # type: ignore[arg-type]
        )  # fmt: skip
        cache = PagedKVCache.allocate(spec, length // 16, DEVICE)
        table = torch.randperm(length // 16, device=DEVICE).int().view(1, -1)
        position = torch.arange(length, device=DEVICE)
        slots = table[0, position // 16].long() * 16 + position % 16
        key, value = torch.randn(2, length, HEADS, size, device=DEVICE).bfloat16()
        write_kv(
            key, value, cache.key_cache, cache.value_cache, slots, k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )  # fmt: skip
        params = AttentionParams(
            scale=size**-0.5, causal=True, k_scale=cache.k_scale, v_scale=cache.v_scale
        )
        for needle in (0, 77_777, length - 1):
            query = key[needle].repeat_interleave(4, 0)[None] * 2.0
            out = torch.empty_like(query)
            paged_decode(
                query, cache.key_cache, cache.value_cache, table,
                torch.tensor([0, 1], device=DEVICE).int(),
                torch.tensor([length], device=DEVICE).int(), params, max_query_len=1,
                max_seq_len=length, out=out,
            )  # fmt: skip
            expected = value[needle].repeat_interleave(4, 0).float()
            found = torch.nn.functional.cosine_similarity(out[0].float(), expected, dim=-1)
            assert found.min() > 0.95, (name, needle, found.min())
