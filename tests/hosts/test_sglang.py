"""attnlib's registration with the real SGLang package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import run_script
from tests.hosts.install import VLLM


@pytest.mark.hosts
def test_sglang_finds_and_registers_attnlib(environment: Any, hosts: Path) -> None:
    variables = environment(VLLM[0])
    variables["PYTHONPATH"] = os.pathsep.join([str(hosts / "sglang"), variables["PYTHONPATH"]])
    run_script("sglang_registration.py", variables)
