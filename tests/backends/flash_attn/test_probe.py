"""Which installed kernels are found, and why others cannot be used."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest
import torch

from attnlib.backends._foreign.imports import Import
from attnlib.backends.flash_attn import FlashAttnBackend, probe
from attnlib.backends.flash_attn.probe import find_kernels
from attnlib.device import DeviceInfo
from tests.backends import fake_flash_attn as fakes
from tests.backends.flash_attn.adapter import (
    H200,
    install_fa3,
    install_fa4,
    install_vllm,
    spec_of,
)


def test_nothing_installed() -> None:
    """I2: a reason with an install command, without an import."""
    (reason,) = FlashAttnBackend.unavailable(H200)
    assert "no FlashAttention is installed" in reason and "pip install" in reason
    assert not any(name in sys.modules and sys.modules[name] is not None for name in fakes.NAMES)


def test_generations_are_identified_by_signature(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """I5: four signatures, four generations, independent of the name of the module."""
    install_fa4(monkeypatch, record)
    install_fa3(monkeypatch, record)
    install_vllm(monkeypatch, record)
    fakes.install(
        monkeypatch, "sgl_kernel.flash_attn", flash_attn_with_kvcache=fakes.fake_sglang(record)
    )
    found = [(kernel.version, kernel.source) for kernel in find_kernels().kernels]
    assert found == [
        (3, "flash_attn_interface"),
        (3, "vllm.vllm_flash_attn"),
        (4, "vllm.vllm_flash_attn"),
        (2, "vllm.vllm_flash_attn"),
        (3, "sgl_kernel.flash_attn"),
        (4, "flash_attn.cute"),
    ]


def test_package_without_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2, I3: the Python files without the compiled module."""
    fakes.install(monkeypatch, "flash_attn")
    (reason,) = FlashAttnBackend.unavailable(H200)
    assert (
        "incomplete" in reason
        and "reinstall" in reason
        and f"torch {torch.__version__}" in reason
        and "sm_90" in reason
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E"),
            "built for another torch",
        ),
        (OSError("libcudart.so.12: cannot open shared object file"), "built for another torch"),
        (RuntimeError("flashinfer-cubin version does not match"), "Reinstall it"),
        (
            ModuleNotFoundError("No module named 'flash_attn_2_cuda'", name="flash_attn_2_cuda"),
            "incomplete",
        ),
    ],
)
def test_import_error_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: Exception, words: str
) -> None:
    """I2, I3: the reason has the original error and the next action."""
    monkeypatch.delitem(sys.modules, "flash_attn")
    name = f", name={error.name!r}" if isinstance(error, ModuleNotFoundError) else ""
    (tmp_path / "flash_attn.py").write_text(f"raise {type(error).__name__}({str(error)!r}{name})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (reason,) = FlashAttnBackend.unavailable(H200)
    assert (
        str(error) in reason
        and type(error).__name__ in reason
        and words in reason
        and "cxx11 ABI" in reason
    )
    assert FlashAttnBackend.validate_configuration(spec_of(), H200) == []  # availability aside


def test_build_without_paging(monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: the signature lacks block_table."""

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> None: ...

    fakes.install(monkeypatch, "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    (reason,) = FlashAttnBackend.unavailable(H200)
    assert "does not support a paged cache" in reason and "2.6" in reason


def test_build_flags(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """I5: features that a build lacks are unsupported; the reason names the build."""
    install_fa3(
        monkeypatch,
        record,
        CONFIG={
            "build_flags": {
                "FLASHATTENTION_DISABLE_SOFTCAP": True,
                "FLASHATTENTION_DISABLE_HDIM256": True,
            }
        },
    )
    reasons = FlashAttnBackend.validate_configuration(
        spec_of(logits_soft_cap=30.0, head_size=256), H200
    )
    assert len(reasons) == 2 and all(
        "FlashAttention 3 (flash_attn_interface" in reason for reason in reasons
    )
    find_kernels.cache_clear()
    install_fa3(
        monkeypatch, record, CONFIG={"build_flags": {"FLASHATTENTION_DISABLE_PAGEDKV": True}}
    )
    (reason,) = FlashAttnBackend.unavailable(H200)
    assert "FLASHATTENTION_DISABLE_PAGEDKV" in reason


def test_unavailable_generation_of_a_build(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """I3: the reason quotes the reason of the build."""
    install_vllm(
        monkeypatch,
        record,
        FA2_AVAILABLE=False,
        FA3_AVAILABLE=False,
        FA4_AVAILABLE=False,
        FA3_UNAVAILABLE_REASON="undefined symbol: xyz",
    )
    reasons = FlashAttnBackend.unavailable(H200)
    assert any("without FlashAttention 3 (undefined symbol: xyz)" in reason for reason in reasons)


def test_vllms_flash_attention_4_without_its_compiler(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """I2: vLLM's flag only says that the files are there; the import fails when it is called."""
    install_vllm(monkeypatch, record, FA2_AVAILABLE=False, FA3_AVAILABLE=False)
    monkeypatch.setitem(sys.modules, "cutlass", None)  # type: ignore[arg-type]  # forbids the import
    reasons = FlashAttnBackend.unavailable(H200)
    assert any("needs cutlass: pip install nvidia-cutlass-dsl" in reason for reason in reasons)


def test_probe_uses_no_network_and_no_device(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """J3, H2."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    install_vllm(monkeypatch, record)
    assert FlashAttnBackend.unavailable(H200) == []
    assert FlashAttnBackend.validate_configuration(spec_of(), H200) == []
    assert not torch.cuda.is_initialized()


def test_cpu_device_imports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """I6: a device that is not supported is refused without importing the package."""
    monkeypatch.delitem(sys.modules, "flash_attn")
    (tmp_path / "flash_attn.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert FlashAttnBackend.unavailable(DeviceInfo("cpu")) == []
    assert FlashAttnBackend.validate_configuration(spec_of(), DeviceInfo("cpu")) == [
        "device cpu not supported (supported: cuda)"
    ]
    assert "flash_attn" not in sys.modules


def test_quack_arch_is_set_during_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H2: quack initializes CUDA at import unless QUACK_ARCH is set; the user's value is kept."""
    values: list[str | None] = []

    def record_arch(path: str) -> Import:
        values.append(os.environ.get("QUACK_ARCH"))
        return Import(None)

    monkeypatch.delenv("QUACK_ARCH", raising=False)
    monkeypatch.setattr(probe, "import_guarded", record_arch)
    monkeypatch.setattr(
        probe, "resolve_device", lambda device: DeviceInfo("cuda", 0, (9, 0), name="H200")
    )
    probe.find_kernels.cache_clear()
    try:
        probe.find_kernels()
        assert set(values) == {"90"} and "QUACK_ARCH" not in os.environ
        monkeypatch.setenv("QUACK_ARCH", "120")
        probe.find_kernels.cache_clear()
        probe.find_kernels()
        assert values[-1] == "120" and os.environ["QUACK_ARCH"] == "120"
    finally:
        probe.find_kernels.cache_clear()
