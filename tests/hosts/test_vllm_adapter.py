"""`vllm_adapter.py`, `vllm_masks.py` and `vllm_latent_adapter.py` under each release of vLLM."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.hosts.conftest import HERE
from tests.hosts.install import VLLM


@pytest.mark.hosts
@pytest.mark.parametrize("version", VLLM)
def test_adapter(environment: Any, version: str) -> None:
    files = "vllm_adapter.py", "vllm_masks.py", "vllm_latent_adapter.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=HERE, env=environment(version, TEST_VLLM_CPU="1"), capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
