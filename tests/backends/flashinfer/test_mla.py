"""The flashinfer_mla backend over a fake of the package: support, plans, outputs."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attnlib import Attention, AttentionSpec, CommonAttentionMetadata, PagedKVCache
from attnlib.backends.base import AttentionBackend
from attnlib.backends.flashinfer.mla import FlashInferMLABackend
from attnlib.backends.flashinfer.mla import metadata as mla_metadata
from attnlib.backends.flashinfer.probe import find_api
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import BackendUnavailableError, ContractError
from attnlib.testing import run_conformance
from attnlib.testing.checks import CHECKS
from tests.backends.flashinfer.fake_mla import FLAT, RELEASES, Calls, install

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=1, head_size=576, head_size_v=512, dtype=torch.bfloat16,
    block_size=16, use_mla=True, needs_lse=True,
)  # fmt: skip


NUMBERS = {"V2", "V3", "W4"}
"""Checks that compare many numbers, which are those of the fake in all releases. They take three
quarters of the time, and run for the oldest and the newest."""


def _on_cpu() -> type[AttentionBackend]:
    """The backend on a CPU, which it takes for an H200."""

    class OnCPU(FlashInferMLABackend):
        capabilities = dataclasses.replace(
            FlashInferMLABackend.capabilities, devices=("cpu", "cuda")
        )

        @classmethod
        def unavailable(cls, device: DeviceInfo) -> list[str]:
            return []

        @classmethod
        def validate_configuration(cls, spec: AttentionSpec, device: Any = None) -> list[str]:
            info = resolve_device(device)
            return super().validate_configuration(spec, H200 if info.type == "cpu" else info)

    return OnCPU


@pytest.fixture(params=RELEASES)
def calls(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Calls:
    monkeypatch.setattr(mla_metadata, "_WORKSPACE_BYTES", 64)
    return install(monkeypatch, request.param)


def _step(query_lens: list[int], seq_lens: list[int], padding: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(0)
    columns = -(-max(seq_lens) // 16)
    blocks = len(seq_lens) * columns
    table = torch.randperm(blocks).view(-1, columns).int()
    common = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, 16, "cpu")
    cache = PagedKVCache.allocate(SPEC, blocks, "cpu")
    cache.key_cache.copy_(torch.randn(cache.key_cache.shape))
    tokens = sum(query_lens) + padding
    key = torch.randn(tokens, 1, 576).bfloat16()
    return torch.randn(tokens, 4, 576).bfloat16(), key, key[..., :512], cache, common


def test_layers_of_one_scale_share_a_plan(calls: Calls) -> None:
    """Outputs and LSE are those of the torch backend, with requests without queries and padding."""
    query, key, value, cache, common = _step([1, 3, 0, 2], [70, 9, 50, 40], padding=2)
    backend = _on_cpu()
    metadata = backend.make_builder(SPEC, "cpu").build(0, common)
    scales = (None, None, 192**-0.5)
    layers = [Attention(SPEC, backend=backend, scale=scale, device="cpu") for scale in scales]
    found = [layer(query, key, value, cache, metadata, return_lse=True) for layer in layers]
    assert [plan["scale"] for plan in calls.plans] == [576**-0.5, 192**-0.5]
    assert len(calls.plans[0]["lengths"]) == 3 and calls.kernels == ["auto", "auto"]
    for (out, lse), scale in zip(found, scales, strict=True):
        reference = Attention(SPEC, backend="torch", scale=scale, device="cpu")
        built = reference.backend.make_builder(SPEC, "cpu").build(0, common)
        expected, logs = reference(query, key, value, cache, built, return_lse=True)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)
        torch.testing.assert_close(lse, logs, rtol=0, atol=2e-2)


def test_a_very_small_lse_is_no_empty_row(calls: Calls) -> None:
    """L1: which rows see no key follows from the lengths, not from the LSE."""
    query, key, value, cache, common = _step([1, 3], [70, 9])
    for lengths in (common.seq_lens, common.seq_lens_cpu):
        lengths[1] = 2
    query.fill_(-24.0)
    cache.key_cache.fill_(30.125)
    key.fill_(30.125)
    backend, results = _on_cpu(), []
    for chosen in (backend, "torch"):
        layer = Attention(SPEC, backend=chosen, scale=0.12, device="cpu")
        built = layer.backend.make_builder(SPEC, "cpu").build(0, common)
        results.append(layer(query, None, None, cache, built, return_lse=True)[1])
    assert (results[1][0] < -45_000 * math.log(2)).all()
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=0)
    assert torch.isneginf(results[0]).all(1).tolist() == [False, True, False, False]


def test_without_lse_nothing_is_allocated_for_it(calls: Calls) -> None:
    query, key, value, cache, common = _step([1], [70])
    backend = _on_cpu()
    metadata = backend.make_builder(SPEC, "cpu").build(0, common)
    output = torch.empty(1, 4, 512, dtype=torch.bfloat16)
    Attention(SPEC, backend=backend, device="cpu")(
        query, key, value, cache, metadata, output=output
    )
    assert calls.runs[0]["out"].data_ptr() == output.data_ptr()
    assert not calls.runs[0]["return_lse"]


def test_output_and_lse_are_written_in_place(calls: Calls) -> None:
    """The wrapper gets the tensors of the caller."""
    query, key, value, cache, common = _step([1, 3], [70, 9])
    backend = _on_cpu()
    metadata = backend.make_builder(SPEC, "cpu").build(0, common)
    output = torch.empty(4, 4, 512, dtype=torch.bfloat16)
    impl = backend.get_impl_cls()(SPEC, scale=0.1)
    lse = torch.empty(4, 4)
    impl.forward(query, cache, metadata, output, lse)
    (call,) = calls.runs
    assert call["out"].data_ptr() == output.data_ptr()
    assert call["lse"].data_ptr() == lse.data_ptr() and torch.isfinite(lse).all()


def test_plans_declare_the_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer 0.7 plans for calls with an LSE or for calls without; older plans serve both."""
    monkeypatch.setattr(mla_metadata, "_WORKSPACE_BYTES", 64)
    query, key, value, cache, common = _step([1, 3], [70, 9])
    backend, output = _on_cpu(), torch.empty(4, 4, 512, dtype=torch.bfloat16)
    for release in RELEASES:
        modes = [None] if release in FLAT else ["base2", "none"]
        calls = install(monkeypatch, release)
        find_api.cache_clear()
        metadata = backend.make_builder(SPEC, "cpu").build(0, common)
        layer = Attention(SPEC, backend=backend, device="cpu")
        expected, _ = layer(query, key, value, cache, metadata, return_lse=True)
        for _ in range(2):
            layer(query, key, value, cache, metadata, output=output)
        assert torch.equal(output, expected)
        assert [plan.get("lse_mode") for plan in calls.plans] == modes


def test_the_configured_kernels(calls: Calls) -> None:
    backend = _on_cpu()
    backend.config = {"kernels": "fa2"}
    query, key, value, cache, common = _step([1], [70])
    metadata = backend.make_builder(SPEC, "cpu").build(0, common)
    Attention(SPEC, backend=backend, device="cpu")(query, key, value, cache, metadata)
    assert calls.kernels == ["fa2"]


@pytest.mark.slow
def test_it_conforms(calls: Calls, request: pytest.FixtureRequest) -> None:
    """The checks of latent layers: padding, sinks, empty rows, LSE, refusals."""
    release = request.node.callspec.params["calls"]
    whole = release in (RELEASES[0], RELEASES[-1])
    report = run_conformance(
        _on_cpu(),
        device="cpu",
        quick=True,
        label="flashinfer_mla",
        checks=[check for check in CHECKS if whole or check.id not in NUMBERS],
    )
    assert report.passed, str(report)
    assert calls.runs  # the fake was called


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size_v": 256}, "head_size_v=256"),
        ({"use_mla": False}, "use_mla=False"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"sliding_window": 8}, "window"),
        ({"logits_soft_cap": 5.0}, "logits_soft_cap"),
    ],
)
def test_reasons(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str) -> None:
    monkeypatch.setattr(FlashInferMLABackend, "unavailable", classmethod(lambda cls, device: []))
    assert FlashInferMLABackend.validate_configuration(SPEC, H200) == []
    found = FlashInferMLABackend.validate_configuration(SPEC.replace(**changes), H200)
    assert found and any(reason in text for text in found), found


def test_availability(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not installed" in FlashInferMLABackend.unavailable(H200)[0]
    install(monkeypatch)
    reasons = FlashInferMLABackend.unavailable(H200)
    assert all("flashinfer compiles its kernels" in reason for reason in reasons)
    module: Any = ModuleType("flashinfer.mla")
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    (reason,) = FlashInferMLABackend.unavailable(H200)
    assert "no mla.BatchMLAPagedAttentionWrapper" in reason
    module.BatchMLAPagedAttentionWrapper = type(
        "Old", (), {"__init__": lambda self, float_workspace_buffer, backend: None, "plan": id}
    )
    (reason,) = FlashInferMLABackend.unavailable(H200)
    assert "plan(qo_indptr=)" in reason


def test_a_failed_build_names_the_error_lines(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value, cache, common = _step([1], [70])
    backend = _on_cpu()
    metadata = backend.make_builder(SPEC, "cpu").build(0, common)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Ninja build failed.\nmla.cu(7): error: no such kernel\n")

    lease = metadata.pool.take()
    monkeypatch.setattr(type(lease.wrapper), "plan", fail)
    with pytest.raises(BackendUnavailableError, match=r"mla\.cu\(7\): error"):
        Attention(SPEC, backend=backend, device="cpu")(query, key, value, cache, metadata)


def test_an_unaligned_cache_is_refused_before_it_is_written(calls: Calls) -> None:
    query, key, value, _, common = _step([1, 2], [70, 9])
    wide = torch.zeros(10, 16, 1, 580, dtype=torch.bfloat16)
    cache = PagedKVCache.from_views(wide[..., :576], wide[..., :512])
    backend = _on_cpu()
    metadata = backend.make_builder(SPEC, "cpu").build(0, common)
    with pytest.raises(ContractError, match="multiples of 8 elements"):
        Attention(SPEC, backend=backend, device="cpu")(query, key, value, cache, metadata)
    assert not wide.any() and not calls.runs
