"""attnlib behind the real classes of SGLang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import run_script
from tests.hosts.install import SGLANG, VLLM


@pytest.mark.hosts
@pytest.mark.parametrize("version", SGLANG)
def test_sglang_finds_attnlib_and_serves_its_batches(
    environment: Any, hosts: Path, version: str
) -> None:
    variables = environment(VLLM[0])
    folders = [str(hosts / name) for name in (f"sglang-{version}", "sglang-packages")]
    variables["PYTHONPATH"] = os.pathsep.join([*folders, variables["PYTHONPATH"]])
    old = ("--old",) if version == SGLANG[0] else ()
    run_script("sglang_registration.py", variables, *old)
