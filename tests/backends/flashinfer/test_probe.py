"""Where FlashInfer gets its kernels."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from attnlib.backends.flashinfer import toolchain
from attnlib.backends.flashinfer.toolchain import toolchain_problems


def test_cuda_home_has_precedence_over_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """FlashInfer prefers CUDA_HOME, so a wrong one is a reason even with nvcc on PATH."""
    monkeypatch.setattr(toolchain, "_has_prebuilt_files", lambda: False)
    for tool in ("nvcc", "ninja"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain_problems("0.6.12") == []
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert "/nowhere/bin/nvcc" in toolchain_problems("0.6.12")[0]


def test_malformed_cuda_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer uses CUDA_HOME=":/usr/local/cuda" as it is; the reason shows the path."""
    monkeypatch.setattr(toolchain, "_has_prebuilt_files", lambda: False)
    monkeypatch.setenv("CUDA_HOME", ":/usr/local/cuda")
    assert (
        "nvcc is not at :/usr/local/cuda/bin/nvcc: set CUDA_HOME" in toolchain_problems("0.6.12")[0]
    )


def test_prebuilt_kernels_need_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """J2: kernels inside the package are enough; an empty folder is not."""
    package = tmp_path / "flashinfer"
    module = package / "data" / "aot" / "batch_prefill" / "batch_prefill.so"
    module.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert len(toolchain_problems("0.6.12")) == 2
    module.write_bytes(b"")
    assert toolchain_problems("0.6.12") == []
