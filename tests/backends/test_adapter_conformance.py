"""The conformance suite on a CPU, for the adapters over fakes of their packages.

The fakes compute with plain torch, so a failure is one of the adapter: unsupported reasons, output
conversion, empty rows, padding, strides, sinks, captured batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attnlib.backends.flash_attn import FlashAttnBackend
from attnlib.backends.flash_attn import metadata as flash_attn_metadata
from attnlib.backends.flash_attn.probe import find_kernels
from attnlib.backends.flashinfer import FlashInferBackend
from attnlib.backends.flashinfer import metadata as flashinfer_metadata
from attnlib.backends.flashinfer.probe import find_api
from attnlib.testing import run_conformance
from tests.backends import fake_flash_attn, fake_flashinfer
from tests.backends.cpu_backend import on_cpu


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    find_kernels.cache_clear()
    find_api.cache_clear()
    yield
    find_kernels.cache_clear()
    find_api.cache_clear()


@pytest.mark.slow
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
        on_cpu(monkeypatch, FlashAttnBackend, flash_attn_metadata, {}),
        device="cpu",
        quick=True,
        label=build,
    )
    assert report.passed, str(report)
    assert record.calls  # the fake was called


@pytest.mark.slow
def test_flashinfer_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    record = fake_flashinfer.Recorder()
    fake_flashinfer.install(monkeypatch, record)
    backend = on_cpu(monkeypatch, FlashInferBackend, flashinfer_metadata, {"workspace_bytes": 64})
    report = run_conformance(backend, device="cpu", quick=True, label="flashinfer")
    assert report.passed, str(report)
    assert record.runs
