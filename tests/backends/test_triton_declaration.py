"""The reasons why the `triton` backend is unavailable, found before any kernel is compiled."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

from attnlib.backends.triton import TritonBackend
from attnlib.device import DeviceInfo

pytest.importorskip("triton", reason="tests the reasons with triton installed")

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler, and a driver library that loads."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())


def compiler(folder: Path, name: str) -> str:
    """An executable that exists."""
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """J1, sgl#1067: "Failed to find C compiler" of a runtime image."""
    assert TritonBackend.unavailable(H200) == [
        "no C compiler for Triton's launcher: install gcc or clang, or set CC to one"
    ]
    compiler(tmp_path, "gcc")
    assert TritonBackend.unavailable(H200) == []
    monkeypatch.setenv("CC", "/nowhere/gcc")
    assert len(TritonBackend.unavailable(H200)) == 1, "CC takes precedence over PATH, as in Triton"
    monkeypatch.setenv("CC", compiler(tmp_path, "my-compiler"))
    assert TritonBackend.unavailable(H200) == []


def test_a_missing_driver_library_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """J1, unsloth#1141: cannot find -lcuda."""
    compiler(tmp_path, "gcc")

    def refuse(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    (reason,) = TritonBackend.unavailable(H200)
    assert "libcuda.so.1 is not found" in reason and "LD_LIBRARY_PATH" in reason


def test_the_machine_is_not_checked_for_a_hypothetical_device() -> None:
    """`explain(spec, device="sm_90")` works without the driver of a GPU."""
    hypothetical = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200", is_hypothetical=True)
    assert TritonBackend.unavailable(hypothetical) == []


def test_without_triton_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: not installed is a reason with the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    before = set(sys.modules)
    assert TritonBackend.unavailable(H200) == ['triton is not installed: pip install "triton>=3.6"']
    assert not {name for name in set(sys.modules) - before if name.startswith("triton")}


@pytest.mark.parametrize(
    ("triton", "numpy", "reasons"),
    [
        ("3.6.0", "2.3.5", []),
        (
            "3.6.0",
            "2.4.0",
            [
                "the interpreter of Triton 3.6 fails with numpy 2.4: "
                'pip install "triton>=3.7", or pip install "numpy<2.4"'
            ],
        ),
        (
            "3.6.1+rocm",
            "2.10.1",
            [
                "the interpreter of Triton 3.6 fails with numpy 2.10: "
                'pip install "triton>=3.7", or pip install "numpy<2.4"'
            ],
        ),
        ("3.7.0", "2.4.6", []),
        ("3.9.0", "2.4.6", []),
        ("3.9.0", None, ["Triton's interpreter needs numpy: pip install numpy"]),
    ],
)
def test_the_interpreter_and_numpy(
    triton: str, numpy: str | None, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.6's interpreter with numpy 2.4 is a reason; GPUs do not need numpy."""

    def version(name: str) -> str:
        found = {"triton": triton, "numpy": numpy}[name]
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonBackend.unavailable(DeviceInfo("cpu")) == reasons
    monkeypatch.delenv("TRITON_INTERPRET")
    without_switch = TritonBackend.unavailable(DeviceInfo("cpu"))
    assert without_switch[0].startswith("a CPU needs Triton's interpreter")
    assert without_switch[1:] == reasons
    assert TritonBackend.unavailable(DeviceInfo("cuda", 0, (9, 0), is_hypothetical=True)) == []
