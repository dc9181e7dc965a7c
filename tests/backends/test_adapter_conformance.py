"""The conformance suite on a CPU, for the adapters over fakes of their packages.

The fakes compute with plain torch, so a failure is one of the adapter: unsupported reasons, output
conversion, empty rows, padding, strides, sinks, captured batches. The run of FlashInfer is in
tests/benchmarks/test_flashinfer_kernels.py, which also checks the kernels that it plans.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attnlib.backends.flash_attn import FlashAttnBackend
from attnlib.backends.flash_attn import metadata as flash_attn_metadata
from attnlib.backends.flash_attn.probe import find_kernels
from attnlib.testing import run_conformance
from tests.backends import fake_flash_attn
from tests.backends.cpu_backend import on_cpu


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    find_kernels.cache_clear()
    yield
    find_kernels.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("build", ["vllm fa2", "vllm fa3", "vllm fa4", "fa4"])
def test_flash_attn_conforms(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    record = fake_flash_attn.Recorder()
    fake_flash_attn.nothing_installed(monkeypatch)
    if build != "fa4":
        varlen, scheduler = fake_flash_attn.fake_vllm(record)
        flags = {f"FA{version}_AVAILABLE": False for version in (2, 3, 4)}
        flags[f"FA{build[-1]}_AVAILABLE"] = True
        fake_flash_attn.install(
            monkeypatch,
            "vllm.vllm_flash_attn",
            flash_attn_varlen_func=varlen,
            get_scheduler_metadata=scheduler,
            **flags,
        )
        fake_flash_attn.install(monkeypatch, "cutlass")
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
