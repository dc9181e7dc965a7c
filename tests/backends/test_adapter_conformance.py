"""The conformance suite on a CPU, for the adapters over fakes of their packages.

The fakes compute with plain torch, so a failure is one of the adapter: unsupported reasons, output
conversion, empty rows, padding, strides, sinks, captured batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from attnlib.backends.base import AttentionBackend
from attnlib.backends.flash_attn import FlashAttnBackend
from attnlib.backends.flash_attn import metadata as flash_attn_metadata
from attnlib.backends.flash_attn.probe import find_kernels
from attnlib.backends.flashinfer import FlashInferBackend
from attnlib.backends.flashinfer import metadata as flashinfer_metadata
from attnlib.backends.flashinfer.probe import find_api
from attnlib.device import DeviceInfo, resolve_device
from attnlib.testing import run_conformance
from tests.backends import fake_flash_attn, fake_flashinfer

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    find_kernels.cache_clear()
    find_api.cache_clear()
    yield
    find_kernels.cache_clear()
    find_api.cache_clear()


def _on_cpu(
    monkeypatch: pytest.MonkeyPatch,
    backend: type[AttentionBackend],
    metadata_module: Any,
    config: dict[str, Any],
) -> type[AttentionBackend]:
    """The backend on a CPU, which it takes for an H200."""

    def validate(cls: Any, spec: Any, device: Any = None) -> list[str]:
        info = resolve_device(device)
        return super(adapted, cls).validate_configuration(
            spec, H200 if info.type == "cpu" else info
        )

    monkeypatch.setattr(metadata_module, "resolve_device", lambda _: H200)
    body = {
        "capabilities": dataclasses.replace(backend.capabilities, devices=("cpu", "cuda")),
        "config": config,
        "validate_configuration": classmethod(validate),
        "unavailable": classmethod(lambda cls, device: []),
    }
    adapted = type(backend.__name__, (backend,), body)
    return adapted


@pytest.mark.parametrize("build", ["vllm", "fa4"])
def test_flash_attn_conforms(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    record = fake_flash_attn.Recorder()
    fake_flash_attn.nothing_installed(monkeypatch)
    if build == "vllm":
        varlen, scheduler = fake_flash_attn.fake_vllm(record)
        flags = {"FA2_AVAILABLE": False, "FA3_AVAILABLE": True}
        fake_flash_attn.install(
            monkeypatch,
            "vllm.vllm_flash_attn",
            flash_attn_varlen_func=varlen,
            get_scheduler_metadata=scheduler,
            **flags,
        )
    else:
        fake_flash_attn.install(
            monkeypatch, "flash_attn.cute", flash_attn_varlen_func=fake_flash_attn.fake_fa4(record)
        )
    report = run_conformance(
        _on_cpu(monkeypatch, FlashAttnBackend, flash_attn_metadata, {}),
        device="cpu",
        quick=True,
        label=build,
    )
    assert report.passed, str(report)
    assert record.calls  # the fake was called


def test_flashinfer_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    record = fake_flashinfer.Recorder()
    fake_flashinfer.install(monkeypatch, record)
    backend = _on_cpu(monkeypatch, FlashInferBackend, flashinfer_metadata, {"workspace_bytes": 64})
    report = run_conformance(backend, device="cpu", quick=True, label="flashinfer")
    assert report.passed, str(report)
    assert record.runs
