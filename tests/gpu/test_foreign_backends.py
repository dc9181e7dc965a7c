"""The conformance suite with the installed external backends: FlashAttention 2 to 4, FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attnlib.backends.flash_attn.support import choose_kernel
from attnlib.device import resolve_device
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.selection import load_backend, register_backend, unregister_backend
from attnlib.testing import run_conformance
from tests.gpu.devices import FOREIGN, backend_or_skip, batch_of, needs_gpu, spec_of

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.fixture
def generation(request: pytest.FixtureRequest) -> Iterator[str]:
    """`flash_attn` with one required generation, registered under another name."""
    version = request.param
    block = 256 if version == 2 else 16
    kernel, reasons = choose_kernel(
        spec_of(block_size=block), resolve_device("cuda"), {"fa_version": version}
    )
    if kernel is None:
        pytest.skip(f"FlashAttention {version}: {'; '.join(reasons) or 'not installed'}")
    name = f"flash_attn_{version}"
    register_backend(
        name, "attnlib.backends.flash_attn:FlashAttnBackend", config={"fa_version": version}
    )
    yield name
    unregister_backend(name)


@pytest.mark.slow
@pytest.mark.parametrize("generation", [2, 3, 4], indirect=True)
def test_every_generation_of_flash_attention_passes(generation: str) -> None:
    report = run_conformance(generation, device="cuda")
    assert report.passed, str(report)


@pytest.mark.slow
def test_flashinfer_passes() -> None:
    backend_or_skip("flashinfer", spec_of())
    report = run_conformance("flashinfer", device="cuda")
    assert report.passed, str(report)


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize(
    "features",
    [{}, {"sliding_window": 33}, {"logits_soft_cap": 15.0}],
    ids=["plain", "window", "cap"],
)
@torch.inference_mode()
def test_the_adapter_agrees_with_torch(name: str, features: dict) -> None:
    """Output and LSE of decodes, chunked prefills, rows without keys and rows past the batch."""
    from attnlib.cache.storage import PagedKVCache
    from attnlib.layer import Attention

    spec = spec_of(needs_lse=True, **features)
    backend, reference = backend_or_skip(name, spec), load_backend("torch")
    caches = [PagedKVCache.allocate(spec, 200, "cuda") for _ in range(2)]
    for cache in caches:
        torch.manual_seed(1)
        cache.key_cache.normal_()
        cache.value_cache.normal_()
    common = batch_of(spec, [1, 1, 7, 40, 0, 3], [300, 1, 200, 40, 9, 3], 200, 0)
    rows = common.num_actual_tokens + 5
    q, k, v = (
        torch.randn(rows, heads, 128, dtype=spec.dtype, device="cuda") for heads in (8, 2, 2)
    )
    results = []
    for cls, cache in ((backend, caches[0]), (reference, caches[1])):
        layer = Attention(spec, backend=cls, device="cuda", scale=0.11)
        results.append(layer(q, k, v, cache, cls.make_builder(spec, "cuda").build(0, common), True))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-2, atol=2e-2)
    # FlashInfer sums weights on the tensor cores after rounding each to bfloat16, an error of up to
    # 2**-9 of the sum. The conformance suite compares the LSE with the oracle.
    torch.testing.assert_close(
        results[0][1], results[1][1], rtol=1e-3, atol=2**-9 if name == "flashinfer" else 1e-3
    )


@pytest.mark.parametrize("splits", [0, 1, 3])
@torch.inference_mode()
def test_key_splits_of_flash_attention_4(splits: int) -> None:
    """Output and LSE of few long decodes; 0 lets the kernel choose."""
    from attnlib.cache.storage import PagedKVCache
    from attnlib.layer import Attention

    spec, config = spec_of(needs_lse=True), {"fa_version": 4, "num_splits": splits}
    kernel, reasons = choose_kernel(spec, resolve_device("cuda"), config)
    if kernel is None:
        pytest.skip("; ".join(reasons) or "not installed")
    register_backend("splits", "attnlib.backends.flash_attn:FlashAttnBackend", config=config)
    cache = PagedKVCache.allocate(spec, 1100, "cuda")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    common = batch_of(spec, [1, 1], [8000, 300], 1100, 0)
    q = torch.randn(2, 8, 128, dtype=spec.dtype, device="cuda")
    try:
        results = []
        for backend in (load_backend("splits"), load_backend("torch")):
            layer = Attention(spec, backend=backend, device="cuda", scale=0.11)
            built = backend.make_builder(spec, "cuda").build(0, common)
            results.append(layer(q, None, None, cache, built, return_lse=True))
    finally:
        unregister_backend("splits")
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_flashinfer_serves_different_layers_with_one_build() -> None:
    """F2: layers with and without a window, with different scales."""
    from attnlib.cache.storage import PagedKVCache
    from attnlib.layer import Attention

    specs = [spec_of(), spec_of(sliding_window=64)]
    backend, reference = backend_or_skip("flashinfer", specs[1]), load_backend("torch")
    layers = {
        "full": PerLayerParameters(-1, None, 0.2),
        "window": PerLayerParameters(63, None, 0.05, 0),
    }
    common = batch_of(specs[0], [1, 30], [300, 200], 100, 0)
    built = backend.make_builder(specs[0], "cuda", layers=layers).build(0, common)
    for spec, parameters in zip(specs, layers.values(), strict=True):
        q = torch.randn(31, 8, 128, dtype=spec.dtype, device="cuda")
        cache = PagedKVCache.allocate(spec, 100, "cuda")
        cache.key_cache.normal_()
        cache.value_cache.normal_()
        mine = Attention(spec, backend=backend, device="cuda", scale=parameters.sm_scale)(
            q, None, None, cache, built
        )
        theirs = Attention(spec, backend=reference, device="cuda", scale=parameters.sm_scale)
        expected = theirs(
            q, None, None, cache, reference.make_builder(spec, "cuda").build(0, common)
        )
        torch.testing.assert_close(mine, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("exact", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", FOREIGN)
@torch.inference_mode()
def test_sinks_within_the_kernel_and_after_it(name: str, exact: bool) -> None:
    """M4: FlashAttention 3 applies sinks that bfloat16 represents; others follow from the LSE."""
    from attnlib.cache.storage import PagedKVCache
    from attnlib.layer import Attention

    spec = spec_of(head_size=64, has_sink=True, needs_lse=True)
    backend, reference = backend_or_skip(name, spec), load_backend("torch")
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25, 3.0, 0.0, -2.0, 1.5], device="cuda") + (
        0.0 if exact else 1e-3
    )
    cache = PagedKVCache.allocate(spec, 100, "cuda")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    common = batch_of(spec, [1, 1, 20], [300, 1, 200], 100, 0)
    q = torch.randn(22, 8, 64, dtype=spec.dtype, device="cuda")
    results = []
    for cls in (backend, reference):
        layer = Attention(spec, backend=cls, device="cuda", sinks=sinks)
        results.append(
            layer(q, None, None, cache, cls.make_builder(spec, "cuda").build(0, common), True)
        )
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-3)
