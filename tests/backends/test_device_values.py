"""Values on the device that break a rule (M3, M4, M9): every backend gives NaN, none a number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.composite import make_composite
from tests.backends.adapters import install_adapters
from tests.backends.fake_flash_attn import Recorder

INVALID = [0.0, -1.0, float("nan"), float("inf"), float("-inf"), 2.0**-101, 2.0**101]
SPEC = attnlib.AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype=torch.float32,
    block_size=16,
    needs_lse=True,
)


def _run(
    backend: Any, spec: attnlib.AttentionSpec, **values: Any
) -> tuple[torch.Tensor, torch.Tensor, attnlib.PagedKVCache]:
    """Output, LSE and cache after one decode, one prefill and a request without keys."""
    torch.manual_seed(0)
    scales = {name: values.pop(name) for name in ("k_scale", "v_scale") if name in values}
    layer = attnlib.Attention(spec, backend=backend, device="cpu", **values)
    cache = attnlib.PagedKVCache.allocate(spec, 8, "cpu", "NHD")
    for view in (cache.key_cache, cache.value_cache):
        view.copy_(torch.randn(view.shape))
    for name, scale in scales.items():
        setattr(cache, name, scale)
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 12], [20, 30], [[1, 2], [3, 4]], 16, "cpu"
    )
    metadata = layer.backend.make_builder(spec, "cpu").build(0, common)
    q, k, v = (torch.randn(13, heads, 64, dtype=spec.dtype) for heads in (4, 2, 2))
    output, lse = layer(q, k, v, cache, metadata, return_lse=True)
    return output, lse, cache


@pytest.mark.parametrize("value", INVALID)
@pytest.mark.parametrize("backend", ["torch", "triton", "prefill:torch,decode:triton"])
def test_invalid_scales_on_the_device(backend: str, value: float) -> None:
    """M9: NaN is stored, and rows that see a key are NaN."""
    spec = SPEC.replace(kv_cache_dtype="fp8", kv_scale_kind="tensor")
    output, lse, cache = _run(backend, spec, k_scale=torch.tensor(value))
    assert bool(output.isnan().all()) and bool(lse.isnan().all())
    assert bool(cache.key_cache[2, 3].float().isnan().all())
    assert bool(cache.value_cache[2, 3].float().isfinite().all())
    output, lse, cache = _run(backend, spec, v_scale=torch.tensor(value))
    assert bool(output.isnan().all()) and bool(lse.isfinite().all())
    assert bool(cache.value_cache[2, 3].float().isnan().all())


@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_invalid_scale_of_one_head(backend: str, which: str) -> None:
    spec = SPEC.replace(kv_cache_dtype="fp8_e5m2", kv_scale_kind="head")
    good, good_lse, _ = _run(backend, spec, **{which: torch.tensor([0.5, 2.0])})
    output, lse, _ = _run(backend, spec, **{which: torch.tensor([0.5, 0.0])})
    assert torch.equal(output[:, :2], good[:, :2]) and torch.equal(lse[:, :2], good_lse[:, :2])
    assert bool(output[:, 2:].isnan().all())


@pytest.mark.parametrize("value", INVALID)
def test_invalid_scales_in_the_adapters(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention gets NaN for both scales; FlashInfer's output is NaN."""
    record = Recorder()
    adapters = install_adapters(monkeypatch, record, "vllm")
    spec = SPEC.replace(dtype=torch.bfloat16, kv_cache_dtype="fp8")
    output, _, _ = _run(adapters["flashinfer"], spec, k_scale=torch.tensor(value))
    assert bool(output.isnan().all())
    output, _, _ = _run(adapters["flashinfer"], spec, v_scale=torch.tensor(value))
    assert bool(output.isnan().all())
    _run(adapters["flash_attn"], spec, k_scale=torch.tensor(value), v_scale=torch.tensor(2.0))
    assert bool(record.last["k_descale"].isnan().all())
    assert bool(record.last["v_descale"].isnan().all())
    _run(adapters["flash_attn"], spec, k_scale=torch.tensor(2.0), v_scale=torch.tensor(value))
    assert bool((record.last["k_descale"] == 2.0).all())
    assert bool(record.last["v_descale"].isnan().all())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    "backend", ["torch", "triton", "flash_attn", "flashinfer", "torch+flash_attn"]
)
def test_invalid_sinks(backend: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """M4: one head is NaN, the others are as without it."""
    adapters: dict[str, Any] = dict(install_adapters(monkeypatch, Recorder(), "vllm"))
    spec = SPEC.replace(dtype=torch.float16, has_sink=True)
    adapters["torch"] = attnlib.get_attn_backend(spec, "torch", "cpu")
    adapters["torch+flash_attn"] = make_composite(adapters["torch"], adapters["flash_attn"])
    chosen = adapters.get(backend, backend)
    sinks = torch.tensor([0.0, value, 1.0, -torch.inf])
    output, lse, _ = _run(chosen, spec, sinks=sinks)
    expected, expected_lse, _ = _run("torch", spec, sinks=torch.tensor([0.0, 0.0, 1.0, -torch.inf]))
    assert bool(output[:, 1].isnan().all()) and bool(lse[:, 1].isnan().all())
    others = [0, 2, 3]
    assert torch.allclose(output[:, others], expected[:, others], atol=2e-3)
    assert torch.allclose(lse[:, others], expected_lse[:, others], atol=2e-3)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_invalid_slopes(backend: str, value: float) -> None:
    """M3"""
    spec = SPEC.replace(has_alibi=True)
    slopes = torch.tensor([0.1, value, 0.2, 0.3])
    output, lse, _ = _run(backend, spec, alibi_slopes=slopes)
    assert bool(output[:, 1].isnan().all()) and bool(lse[:, 1].isnan().all())
    assert bool(output[:, [0, 2, 3]].isfinite().all())


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-30, 1e-7, -0.1])
def test_tiny_and_negative_softmax_scales(scale: float) -> None:
    """M3: kernels that scale after masking would make -inf * 0 of a hidden key."""
    spec = SPEC.replace(sliding_window=7)
    expected = _run("torch", spec, scale=scale)
    output = _run("triton", spec, scale=scale)
    assert torch.allclose(output[0], expected[0], atol=1e-5)
    assert torch.allclose(output[1], expected[1], atol=1e-5)
