"""The adapters on a CPU over fakes of their packages, for tests of what all backends share."""

from __future__ import annotations

import pytest

from attnlib.backends.base import AttentionBackend
from attnlib.backends.flash_attn import FlashAttnBackend
from attnlib.backends.flash_attn import metadata as flash_attn_metadata
from attnlib.backends.flash_attn.probe import find_kernels
from attnlib.backends.flashinfer import FlashInferBackend
from attnlib.backends.flashinfer import metadata as flashinfer_metadata
from attnlib.backends.flashinfer.probe import find_api
from tests.backends import fake_flash_attn, fake_flashinfer
from tests.backends.cpu_backend import on_cpu


def install_adapters(
    monkeypatch: pytest.MonkeyPatch, record: fake_flash_attn.Recorder, build: str = "fa4"
) -> dict[str, type[AttentionBackend]]:
    """The adapters by name; `build` is "fa4" or "vllm" (FlashAttention 3 with float8)."""
    find_kernels.cache_clear()
    find_api.cache_clear()
    fake_flash_attn.nothing_installed(monkeypatch)
    if build == "fa4":
        kernel = fake_flash_attn.fake_fa4(record)
        fake_flash_attn.install(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=kernel)
    else:
        kernel, scheduler = fake_flash_attn.fake_vllm(record)
        fake_flash_attn.install(
            monkeypatch,
            "vllm.vllm_flash_attn",
            flash_attn_varlen_func=kernel,
            get_scheduler_metadata=scheduler,
            FA2_AVAILABLE=False,
            FA3_AVAILABLE=True,
            FA4_AVAILABLE=False,
        )
    fake_flashinfer.install(monkeypatch, fake_flashinfer.Recorder())
    flashinfer = on_cpu(
        monkeypatch, FlashInferBackend, flashinfer_metadata, {"workspace_bytes": 64}
    )
    return {
        "flash_attn": on_cpu(
            monkeypatch, FlashAttnBackend, flash_attn_metadata, {"quantize_query": True}
        ),
        "flashinfer": flashinfer,
    }
