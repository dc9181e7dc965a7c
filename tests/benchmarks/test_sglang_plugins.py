"""`benchmarks/hosts/sglang_plugins.py` in processes that are started after it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "hosts"
CHILD = """
from importlib.metadata import entry_points
import flashinfer
from flashinfer import bmm_fp8
from flashinfer.sampling import min_p_sampling_from_probs
for name in "norm", "gemm":
    try:
        __import__(f"flashinfer.{name}")
    except ImportError:
        print("absent", name)
try:
    bmm_fp8(1, 2)
except NotImplementedError as error:
    print(error)
print([one.value for one in entry_points(group="sglang.srt.plugins") if "sglang_" in one.name])
"""


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, an environment that is restored, and a release of SGLang with two models."""
    monkeypatch.syspath_prepend(str(FOLDER))
    models = tmp_path / "site" / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    for file in ("llama.py", "mixtral.py", "../../__init__.py"):
        (models / file).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_IS_FLASHINFER_AVAILABLE", "CUDA_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    import sglang_plugins

    return sglang_plugins


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_processes_find_plugins_and_names_of_flashinfer(plugins: Any) -> None:
    """Modules for which SGLang has kernels of its own are absent: it takes those kernels."""
    plugins.prepare("sglang_native")
    result = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True
    )
    *absent, refusal, found = result.stdout.splitlines()
    assert absent == ["absent norm", "absent gemm"]
    assert "flashinfer.bmm_fp8" in refusal and "install it" in refusal
    assert found == "['sglang_native:register']"
    assert os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] == "false"
    assert os.environ["SGLANG_DISABLED_MODEL_ARCHS"] == "mixtral"


def test_toolkit_is_that_of_the_compiler(
    plugins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc may be a script that runs a compiler of another folder."""
    toolkit, scripts = tmp_path / "cuda-13", tmp_path / "bin"
    (toolkit / "bin").mkdir(parents=True)
    scripts.mkdir()
    (scripts / "nvcc").write_text(f"#!/bin/sh\necho '#$ TOP={toolkit}/bin/..' >&2\n")
    (scripts / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(scripts), prepend=os.pathsep)
    plugins.prepare()
    assert os.environ["CUDA_HOME"] == str(toolkit)
    monkeypatch.setenv("CUDA_HOME", "given")
    plugins.prepare()
    assert os.environ["CUDA_HOME"] == "given"
