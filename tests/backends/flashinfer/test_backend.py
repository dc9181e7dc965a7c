"""Availability and capabilities of the flashinfer backend."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest
import torch

from attnlib.backends.flashinfer import FlashInferBackend, toolchain
from attnlib.backends.flashinfer.probe import find_api
from attnlib.device import DeviceInfo
from attnlib.spec import CudaGraphSupport, MaskKind, Window
from tests.backends import fake_flashinfer as fakes
from tests.backends.flashinfer.adapter import H200, spec_of


def test_not_installed() -> None:
    """I2: a reason with an install command."""
    assert FlashInferBackend.unavailable(H200) == [
        "flashinfer is not installed: pip install flashinfer-python"
    ]


def test_runtime_error_at_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """I2: mismatched cubin packages raise RuntimeError, not ImportError."""
    monkeypatch.delitem(sys.modules, "flashinfer")
    (tmp_path / "flashinfer.py").write_text(
        "raise RuntimeError('flashinfer-cubin version (0.6.13) does not match "
        "flashinfer version (0.6.12)')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (reason,) = FlashInferBackend.unavailable(H200)
    assert (
        "RuntimeError: flashinfer-cubin version (0.6.13) does not match" in reason
        and f"torch {torch.__version__}" in reason
    )


def test_incomplete_package_and_old_signature(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """I5: the reason names the class or argument."""
    module = sys.modules["flashinfer"]
    monkeypatch.setattr(
        module.BatchPrefillWithPagedKVCacheWrapper, "run", lambda self, q, paged_kv_cache: None
    )
    (reason,) = FlashInferBackend.unavailable(H200)
    assert (
        "BatchPrefillWithPagedKVCacheWrapper.run(q_scale=)" in reason and "pip install -U" in reason
    )
    find_api.cache_clear()
    monkeypatch.delattr(module, "BatchDecodeWithPagedKVCacheWrapper")
    (reason,) = FlashInferBackend.unavailable(H200)
    assert "no BatchDecodeWithPagedKVCacheWrapper" in reason


def test_no_source_of_kernels(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, tmp_path: Any
) -> None:
    """J2: nvcc and ninja or matching prebuilt kernels; otherwise reasons with the next action."""
    monkeypatch.setattr(toolchain, "_has_prebuilt_files", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    reasons = FlashInferBackend.unavailable(H200)
    assert (
        len(reasons) == 2 and str(tmp_path / "bin" / "nvcc") in reasons[0] and "ninja" in reasons[1]
    )
    monkeypatch.setattr(toolchain, "package_version", lambda *names: "0.6.11+cu130")
    assert (
        "0.6.11+cu130 does not match flashinfer 0.6.12" in FlashInferBackend.unavailable(H200)[-1]
    )
    monkeypatch.setattr(toolchain, "package_version", lambda *names: "0.6.12+cu130")
    assert FlashInferBackend.unavailable(H200) == []
    monkeypatch.setattr(toolchain, "package_version", lambda *names: "")
    for tool in ("bin/nvcc", "ninja"):
        (tmp_path / tool).parent.mkdir(exist_ok=True)
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    assert FlashInferBackend.unavailable(H200) == []
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT" in FlashInferBackend.unavailable(H200)[0]


def test_probe_has_no_side_effects(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """J2, J3, H2: no network, no CUDA initialization, no environment variable left set."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delitem(sys.modules, "flashinfer")
    (tmp_path / "flashinfer.py").write_text(
        "import os, torch\nseen = os.environ['FLASHINFER_CUDA_ARCH_LIST']\n"
        "capability = torch.cuda.get_device_capability(0)  # at import since 0.7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = torch.cuda.get_device_capability
    FlashInferBackend.unavailable(H200)
    assert sys.modules["flashinfer"].seen == "9.0"
    assert sys.modules["flashinfer"].capability == (9, 0)
    assert torch.cuda.get_device_capability is asked
    assert "FLASHINFER_CUDA_ARCH_LIST" not in os.environ and not torch.cuda.is_initialized()


def test_cpu_device_imports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """I6: a device that is not supported is refused without importing the package."""
    monkeypatch.delitem(sys.modules, "flashinfer")
    (tmp_path / "flashinfer.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert FlashInferBackend.unavailable(DeviceInfo("cpu")) == []
    assert "flashinfer" not in sys.modules


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_size": 96}, "head_size=96 not supported (supported: 64, 128, 256)"),
        ({"has_alibi": True}, "ALiBi slopes: not supported"),
        ({"kv_cache_dtype": "fp8", "kv_scale_kind": "head"}, "kv_scale_kind=head not supported"),
        (
            {"mask_kind": MaskKind.BIDIRECTIONAL, "window": Window(4, 4)},
            "a bound of 4 keys after the query's own",
        ),
        (
            {"mask_kind": MaskKind.BIDIRECTIONAL, "sliding_window": 4},
            "a bound of 3 keys after the query's own",
        ),
        ({"cudagraph": CudaGraphSupport.UNIFORM_BATCH}, "cudagraph=UNIFORM_BATCH not supported"),
        ({"batch_invariant": True}, "batch_invariant=True: not supported"),
    ],
)
def test_unsupported_reasons(changes: dict[str, Any], words: str) -> None:
    """S5: reasons name the value and the limit."""
    assert any(
        words in reason
        for reason in FlashInferBackend.validate_configuration(spec_of(**changes), H200)
    )


def test_unsupported_compute_capability(record: fakes.Recorder) -> None:
    """I4: reported at selection, not as an error of a kernel."""
    (reason,) = FlashInferBackend.validate_configuration(
        spec_of(), DeviceInfo("cuda", 0, (7, 0), name="Tesla V100")
    )
    assert "7.0" in reason and "8.0" in reason
