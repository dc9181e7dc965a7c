"""attnlib behind torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attnlib
from attnlib import compat
from attnlib.errors import BackendUnavailableError, UnsupportedConfigError

registry: Any = pytest.importorskip("torch.nn.attention")
if not hasattr(registry, "restore_flash_attention_impl"):
    reason = "torch before 2.11 cannot restore its own kernels"
    pytest.skip(reason, allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16 if DEVICE == "cuda" else torch.float32
BACKEND = "triton" if DEVICE == "cuda" else "torch"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls of `Attention` while attnlib is active in torch."""
    seen: list[Any] = []
    compat.register_flash_attention_impl()
    registry.activate_flash_attention_impl("attnlib")
    observers = attnlib.instrumentation.OBSERVERS
    observers.append(lambda *call: seen.append(call))
    try:
        with attnlib.use_backend(BACKEND):
            yield seen
    finally:
        observers.pop()
        registry.restore_flash_attention_impl()


@pytest.mark.parametrize("causal", [True, False])
def test_scaled_dot_product_attention(calls: list[Any], causal: bool) -> None:
    """Equal to torch's mathematical definition; torch's own kernels return afterwards."""
    q, k, v = torch.randn(3, 2, 4, 9, 32, device=DEVICE, dtype=DTYPE)
    with torch.no_grad(), registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
        got = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert len(calls) == 1
        registry.restore_flash_attention_impl()
        F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert len(calls) == 1
    with registry.sdpa_kernel(registry.SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    tolerance = 2e-3 if DTYPE == torch.float16 else 1e-5
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU torch chooses other kernels for masks")
def test_masks_are_left_to_torch(calls: list[Any]) -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 32)
    mask = torch.rand(2, 1, 9, 9) > 0.3
    mask[..., 0] = True
    with torch.no_grad():
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with registry.sdpa_kernel(registry.SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert not calls


def test_gradients_are_torchs(calls: list[Any]) -> None:
    """torch computes gradients by its own kernel, from attnlib's output and LSE."""
    inputs = [torch.randn(2, 4, 9, 32, device=DEVICE, dtype=DTYPE) for _ in range(3)]
    found = []
    for kernel in (registry.SDPBackend.FLASH_ATTENTION, registry.SDPBackend.MATH):
        tensors = [x.clone().requires_grad_() for x in inputs]
        with registry.sdpa_kernel(kernel):
            F.scaled_dot_product_attention(*tensors, is_causal=True).square().sum().backward()
        found.append([x.grad for x in tensors])
    assert len(calls) == 1
    tolerance = 2e-2 if DTYPE == torch.float16 else 1e-4
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


def test_dropout_is_refused(calls: list[Any]) -> None:
    q = torch.randn(2, 4, 9, 32, device=DEVICE, dtype=DTYPE)
    arguments = (q, q, q, 0.1) if DEVICE == "cuda" else (q, q, q, 0.1, False)
    suffix = "" if DEVICE == "cuda" else "_for_cpu"
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{suffix}")
    with torch.no_grad(), pytest.raises(UnsupportedConfigError, match="dropout_p=0.1"):
        operator(*arguments)


def test_a_torch_without_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(registry, "register_flash_attention_impl")
    with pytest.raises(BackendUnavailableError, match="has no torch.nn.attention.register"):
        compat.register_flash_attention_impl()


def test_a_transformers_model_generates_equal_tokens(calls: list[Any]) -> None:
    """`attn_implementation="sdpa"` through attnlib and eager attention give the same tokens."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to(DEVICE)
    if DEVICE == "cuda":
        model = model.to(torch.float16)
    prompt = torch.randint(0, 97, (2, 11), device=DEVICE)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    model.set_attn_implementation("eager")
    wanted = model.generate(prompt, **options)
    assert not calls
    model.set_attn_implementation("sdpa")
    with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
        got = model.generate(prompt, **options)
    assert torch.equal(got, wanted)
    assert len(calls) == 12 * 3  # every layer of every step
