"""The adapter inside each release of vLLM, without an engine: files that another process runs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.hosts.conftest import HERE, run_script
from tests.hosts.install import VLLM

pytestmark = pytest.mark.hosts


def run_files(variables: dict[str, str], *files: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, cwd=HERE, env=variables, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("version", VLLM)
def test_adapter(environment: Any, version: str) -> None:
    files = "vllm_adapter.py", "vllm_masks.py", "vllm_latent_adapter.py", "vllm_states.py"
    run_files(environment(version, TEST_VLLM_CPU="1"), *files)


@pytest.mark.parametrize("version", VLLM)
def test_divided_layers(environment: Any, version: str) -> None:
    """X4, X5: decode context parallelism with windows, ALiBi, sinks and latents."""
    printed = run_script("vllm_divided.py", environment(version, TEST_VLLM_CPU="1"))
    for name, texts in json.loads(printed.splitlines()[-1]).items():
        assert not any(texts), (name, texts)


@pytest.mark.parametrize("version", VLLM)
def test_adapter_by_interpreted_triton_kernels(environment: Any, version: str) -> None:
    variables = {"ATTNLIB_BACKEND": "triton", "TRITON_INTERPRET": "1"}
    files = "vllm_masks.py", "vllm_scheduling.py"
    run_files(environment(version, TEST_VLLM_CPU="1", **variables), *files)
