"""The flash_mla backend over a fake of the package: support, one call per query length, outputs."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attnlib import Attention, AttentionSpec, CommonAttentionMetadata, PagedKVCache
from attnlib.backends.base import AttentionBackend
from attnlib.backends.flash_mla import FlashMLABackend
from attnlib.backends.flash_mla.probe import FUNCTIONS
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import ContractError
from attnlib.testing import run_conformance
from tests.backends.flash_mla.fake import Calls, install

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=1, head_size=576, head_size_v=512, dtype=torch.bfloat16,
    block_size=64, use_mla=True, needs_lse=True,
)  # fmt: skip


def _on_cpu() -> type[AttentionBackend]:
    """The backend on a CPU, which it takes for an H200."""

    class OnCPU(FlashMLABackend):
        capabilities = dataclasses.replace(FlashMLABackend.capabilities, devices=("cpu", "cuda"))

        @classmethod
        def unavailable(cls, device: DeviceInfo) -> list[str]:
            return []

        @classmethod
        def validate_configuration(cls, spec: AttentionSpec, device: Any = None) -> list[str]:
            info = resolve_device(device)
            return super().validate_configuration(spec, H200 if info.type == "cpu" else info)

    return OnCPU


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return install(monkeypatch)


def _step(query_lens: list[int], seq_lens: list[int]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    columns = -(-max(seq_lens) // 64)
    blocks = len(seq_lens) * columns
    table = torch.randperm(blocks).view(-1, columns).int()
    common = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, 64, "cpu")
    cache = PagedKVCache.allocate(SPEC, blocks, "cpu")
    cache.key_cache.copy_(torch.randn(cache.key_cache.shape))
    tokens = sum(query_lens)
    key = torch.randn(tokens, 1, 576).bfloat16()
    return torch.randn(tokens, 4, 576).bfloat16(), key, key[..., :512], cache, common


def test_one_call_per_query_length_and_one_plan_per_batch(calls: Calls) -> None:
    """The layers of a step share the plan; the output is that of the torch backend."""
    query, key, value, cache, common = _step([1, 3, 1, 0, 3], [70, 9, 1, 50, 200])
    backend = _on_cpu()
    metadata = backend.make_builder(SPEC, "cpu").build(0, common)
    layers = [Attention(SPEC, backend=backend, device="cpu") for _ in range(2)]
    found = [layer(query, key, value, cache, metadata) for layer in layers]
    assert calls.shapes == [(2, 1), (2, 3)] * 2 and calls.plans == 2
    reference = Attention(SPEC, backend="torch", device="cpu")
    built = reference.backend.make_builder(SPEC, "cpu").build(0, common)
    expected = reference(query, key, value, cache, built)
    for out in found:
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("takes_out", [True, False])
@pytest.mark.parametrize(
    ("query_lens", "copied"),
    [([1, 1], [False]), ([1, 1, 3], [False, True]), ([3, 1], [True, False])],
)
def test_the_first_requests_are_not_copied(
    monkeypatch: pytest.MonkeyPatch, query_lens: list[int], copied: list[bool], takes_out: bool
) -> None:
    """Neither their queries, nor their outputs where FlashMLA writes to a given tensor."""
    calls = install(monkeypatch, takes_out)
    query, key, value, cache, common = _step(query_lens, [70, 9, 200][: len(query_lens)])
    backend = _on_cpu()
    metadata = backend.make_builder(SPEC, "cpu").build(0, common)
    found = Attention(SPEC, backend=backend, device="cpu")(query, key, value, cache, metadata)
    assert [address != query.data_ptr() for address in calls.queries] == copied
    in_place = [address == found.data_ptr() for address in calls.outputs]
    assert in_place == [takes_out and not copy for copy in copied]
    reference = Attention(SPEC, backend="torch", device="cpu")
    built = reference.backend.make_builder(SPEC, "cpu").build(0, common)
    expected = reference(query, key, value, cache, built)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


@pytest.mark.slow
def test_it_conforms(calls: Calls) -> None:
    """The checks of latent layers: padding, sinks, empty rows, LSE, refusals."""
    report = run_conformance(_on_cpu(), device="cpu", quick=True, label="flash_mla")
    assert report.passed, str(report)
    assert calls.shapes  # the fake was called


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 16}, "block_size=16"),
        ({"head_size_v": 256}, "head_size_v=256"),
        ({"use_mla": False}, "use_mla=False"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"sliding_window": 8}, "window"),
        ({"logits_soft_cap": 5.0}, "logits_soft_cap"),
    ],
)
def test_reasons(changes: dict[str, Any], reason: str) -> None:
    assert FlashMLABackend.validate_configuration(SPEC, H200) == []
    found = FlashMLABackend.validate_configuration(SPEC.replace(**changes), H200)
    assert found and any(reason in text for text in found), found
    a100 = DeviceInfo("cuda", 0, (8, 0), name="NVIDIA A100")
    assert FlashMLABackend.validate_configuration(SPEC, a100)


def test_availability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)  # type: ignore[arg-type]  # the documented way to forbid an import
    assert "not installed" in FlashMLABackend.unavailable(H200)[0]
    monkeypatch.setitem(sys.modules, "flash_mla", ModuleType("flash_mla"))
    (reason,) = FlashMLABackend.unavailable(H200)
    assert "get_mla_metadata, flash_mla_with_kvcache" in reason
    fake = install(monkeypatch)
    assert FlashMLABackend.unavailable(H200) == []
    # The build of a vLLM wheel serves where the package is not installed.
    monkeypatch.setitem(sys.modules, "flash_mla", None)  # type: ignore[arg-type]  # as above
    path = "vllm"
    for name in ("", ".third_party", ".flashmla", ".flash_mla_interface"):
        path += name
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    assert "no function" in FlashMLABackend.unavailable(H200)[0]
    for name in FUNCTIONS:
        monkeypatch.setattr(sys.modules[path], name, getattr(fake, name), raising=False)
    assert FlashMLABackend.unavailable(H200) == []


def test_a_strided_cache_is_refused_before_it_is_written(calls: Calls) -> None:
    query, key, value, _, common = _step([1, 2], [70, 9])
    wide = torch.zeros(4, 64, 1, 640, dtype=torch.bfloat16)
    cache = PagedKVCache.from_views(wide[..., :576], wide[..., :512])
    backend = _on_cpu()
    metadata = backend.make_builder(SPEC, "cpu").build(0, common)
    with pytest.raises(ContractError, match="contiguous"):
        Attention(SPEC, backend=backend, device="cpu")(query, key, value, cache, metadata)
    assert not wide.any() and not calls.shapes
