"""Triton over pages that hold their scales, against the torch operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.errors import ContractError
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.kv_rotation import KVRotation
from attnlib.ops.params import AttentionParams
from attnlib.ops.rotary import HeadNorm
from attnlib.ops.torch.rotary_write import rotate_and_write as rotate_and_write_in_torch
from attnlib.ops.triton.cache_write import write_kv
from attnlib.ops.triton.kernels.page_formats import PAGE_E4M3, PAGE_INT4, PAGE_INT8, unpack_ptx
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.paged_decode import paged_decode
from attnlib.ops.triton.rotary_write import rotate_and_write
from tests.ops.triton.emulated_ptx import emulate, floats

NAMES = tuple(PAGE_FORMATS)


def _spec(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> attnlib.AttentionSpec:
    return attnlib.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=32, dtype=dtype, kv_cache_dtype=name, block_size=16,
    ).replace(**changes)  # fmt: skip


def _run(
    backend: str, spec: attnlib.AttentionSpec, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two steps of a mixed batch on one backend: output, LSE and pages."""
    layer = attnlib.Attention(spec, backend=backend, device=device)
    cache = attnlib.PagedKVCache.allocate(spec, 12, device)
    torch.manual_seed(0)
    table = [[3, 5, 0, 7], [1, 2, 11, -9]]
    for query_lens, seq_lens in (([40, 30], [40, 30]), ([1, 7], [41, 37])):
        tokens = sum(query_lens)
        q, k, v = (torch.randn(tokens, heads, 32).to(spec.dtype).to(device) for heads in (4, 2, 2))
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, torch.tensor(table, dtype=torch.int32), 16, device
        )
        step = layer.backend.make_builder(spec, device).build(0, common)
        out, lse = layer(q, k, v, cache, step, return_lse=True)
    assert cache.pages is not None
    return out, lse, cache.pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("name", NAMES)
def test_layers_agree_with_torch(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """M16: equal bytes in the pages, and equal results within rounding."""
    spec = _spec(name, dtype)
    out, lse, pages = _run("triton", spec, device)
    wanted, wanted_lse, wanted_pages = _run("torch", spec, device)
    assert torch.equal(pages, wanted_pages)
    atol = 1e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(out, wanted, rtol=0, atol=atol)
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-3)


def test_splits_and_tokens_first(device: torch.device) -> None:
    """A request in several splits, pages ordered by token, alone and without the layer."""
    spec = _spec("int4_per_group", block_size=8, needs_lse=True)
    cache = attnlib.PagedKVCache.allocate(spec, 12, device, "NHD_INTERLEAVED")
    torch.manual_seed(0)
    new = torch.randn(96, 2, 32, device=device)
    slots = torch.arange(96, device=device)
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    write_kv(new, new.flip(0), cache.key_cache, cache.value_cache, slots, **scales)
    params = AttentionParams(scale=0.2, window=(70, -1), **scales)
    query = torch.randn(2, 4, 32, device=device)
    table = torch.arange(12, dtype=torch.int32, device=device).view(1, 12)
    lengths = torch.tensor([0, 1, 96], dtype=torch.int32, device=device)
    results = []
    for num_splits in (1, 3):
        out, lse = torch.full_like(query, 7.0), torch.empty(2, 4, device=device)
        paged_decode(
            query, cache.key_cache, cache.value_cache, table, lengths[:2], lengths[2:], params,
            max_query_len=1, max_seq_len=96, out=out, lse=lse, num_splits=num_splits,
        )  # fmt: skip
        assert not out[1].any() and bool((lse[1] == -torch.inf).all())
        results.append((out, lse))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_views_that_cannot_be_loaded_are_refused(device: torch.device) -> None:
    """P13: heads of an odd number of bytes, scales of a head that are not adjacent."""
    odd = torch.zeros(2, 16, 2, 9, dtype=torch.int8, device=device)
    scales = torch.zeros(2, 16, 2, 1, device=device)
    slots, new = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, 2, 9).to(device)
    with pytest.raises(ContractError, match="9 bytes per head .* use an even head size"):
        write_kv(new, new, odd, odd.clone(), slots, k_scale=scales, v_scale=scales.clone())
    packed = torch.zeros(2, 16, 2, 16, dtype=torch.uint8, device=device)
    far = torch.zeros(2, 16, 2, 5, dtype=torch.float16, device=device)[..., :4]
    new = torch.ones(1, 2, 32, device=device)
    with pytest.raises(ContractError, match="must be multiples of 4 .* loaded at once"):
        write_kv(new, new, packed, packed.clone(), slots, k_scale=far, v_scale=far.clone())
    assert not packed.any() and not far.any()


_ROTARY = [  # format, values, head size, rotation for the cache, dtype, angles, norm, interleaved
    ("int8_per_token_head", None, 32, "hadamard", torch.float32, 16, "gemma", False),
    ("int4_per_group", None, 96, "hadamard_keys@3", torch.float16, 48, "llama", False),
    ("nvfp4", None, 64, None, torch.float16, 16, "llama", True),
    ("int8_per_token_head", "int4_per_group", 64, "hadamard", torch.float32, 8, None, False),
]


@pytest.mark.parametrize("case", _ROTARY, ids=lambda case: f"{case[0]}-{case[3]}")
def test_a_rotary_write_of_pages_is_one_launch(
    case: tuple[Any, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and bytes are those of the operations one after the other, NaN and slots included."""
    stored, values, size, rotation, dtype, half, kind, interleaved = case
    spec = attnlib.AttentionSpec(
        num_heads=6, num_kv_heads=3, head_size=size, dtype=dtype, kv_cache_dtype=stored,
        value_cache_dtype=values, kv_rotation=rotation,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, n, size, generator=generator).to(dtype) for n in (6, 3, 3))
    key[1, 0, 3], value[2, 1, 2], value[0, 0, 1] = torch.nan, torch.inf, 6e4
    angles = torch.randn(5, half, generator=generator)
    norm = kind and HeadNorm(
        torch.randn(size, generator=generator).to(device, dtype), 1e-5, float(kind == "gemma"),
        kind == "gemma",
    )  # fmt: skip
    slots = torch.tensor([3, 17, -1, 30], device=device)
    calls = []
    launch = BoundLaunch.by_triton
    monkeypatch.setattr(
        BoundLaunch, "by_triton", lambda self, *call: (calls.append(self), launch(self, *call))
    )
    results = []
    for operation in (rotate_and_write_in_torch, rotate_and_write):
        cache = attnlib.PagedKVCache.allocate(spec, 2, device)
        assert cache.pages is not None
        cache.pages.fill_(7)
        tables = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        out = operation(
            query.to(device), key.to(device), value.to(device), cache.key_cache, cache.value_cache,
            slots, *tables, interleaved=interleaved, q_norm=norm, k_norm=norm,
            k_scale=cache.k_scale, v_scale=cache.v_scale, rotation=spec.kv_rotation,
        )  # fmt: skip
        elements = (view.view(torch.uint8) for view in (cache.key_cache, cache.value_cache))
        results.append((out, cache.k_scale.float(), cache.v_scale.float(), *elements))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)
    if device.type == "cpu":
        assert len(calls) == 1


def test_layers_write_rotated_pages_in_one_launch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a layer that writes in its own call, in a pair of backends, and from a plan."""
    names: list[str] = []
    launch = BoundLaunch.by_triton

    def note(self: BoundLaunch, *call: Any) -> None:
        names.append(self._kernel.__name__)
        launch(self, *call)

    monkeypatch.setattr(BoundLaunch, "by_triton", note)
    spec = _spec("int8_per_token_head", kv_rotation="hadamard")
    common = attnlib.CommonAttentionMetadata.from_lengths([2], [5], [[0]], 16, device)
    rows = [torch.randn(2, heads, 32, device=device) for heads in (4, 2, 2)]
    angles = torch.randn(2, 16, device=device)
    for backend in ("triton", "prefill:triton,decode:triton"):
        layer = attnlib.Attention(spec, backend=backend, device=device)
        cache = attnlib.PagedKVCache.allocate(spec, 2, device)
        batch = layer.backend.make_builder(spec, device).build(0, common)
        layer(*rows, cache, batch)
        assert names.count("write_pages_kernel") == 1
        assert names.count("rotate_heads_kernel") == 2, names  # the queries, and the output back
        names.clear()
        if backend == "triton":
            for _ in range(2):  # the second call repeats the plan
                layer.rotate_and_write_kv(*rows, cache, batch, angles.cos(), angles.sin())
            assert names == ["rotate_and_write_pages_kernel"] * 2
            names.clear()


def test_a_rotation_of_heads_without_scales_is_refused(device: torch.device) -> None:
    """These kernels rotate what they quantize; other caches take heads that are rotated."""
    cache, new = torch.zeros(2, 16, 2, 32, device=device), torch.ones(1, 2, 32, device=device)
    slots, rotation = torch.zeros(1, dtype=torch.int64, device=device), KVRotation()
    query = torch.ones(1, 4, 32, device=device)
    views = (cache, cache.clone(), slots)
    with pytest.raises(ContractError, match="call rotate_heads"):
        write_kv(new, new, *views, rotation=rotation)
    with pytest.raises(ContractError, match="call rotate_heads"):
        rotate_and_write(query, new, new, *views, None, None, rotation=rotation)
    assert not cache.any()


@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("kind", [PAGE_INT8, PAGE_E4M3, PAGE_INT4], ids=["int8", "e4m3", "int4"])
def test_ptx_converts_every_byte_exactly(kind: Any, capability: int) -> None:
    """The instructions of a GPU, emulated, on every byte in each position of a register."""
    kind = kind.value
    code = unpack_ptx(kind, capability)
    for byte in range(256):
        if kind == PAGE_E4M3.value and byte & 0x7F == 0x7F:
            continue  # NaN is not stored
        other = (byte * 7 + 3) % (127 if kind == PAGE_E4M3.value else 256)
        word = byte | other << 8 | other << 16 | byte << 24
        pairs = emulate(code, word)
        for half, low, high in ((0, byte, other), (1, other, byte)):
            if kind == PAGE_INT4.value:
                expected = [(x >> shift & 15) - 8.0 for x in (low, high) for shift in (0, 4)]
            else:
                stored = torch.tensor([low, high], dtype=torch.uint8)
                real = torch.int8 if kind == PAGE_INT8.value else torch.float8_e4m3fn
                expected = stored.view(real).float().tolist()
            for pair, want in zip(pairs, expected, strict=True):
                assert float(floats(pair)[half]) == want, (kind, byte, half)
