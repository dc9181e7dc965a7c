"""The environment of the hosts: releases of vLLM that `install.py` unpacked, and tiny models."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.install import VLLM

HERE = Path(__file__).parent
_PACKAGES = {
    "vllm_cpu_platform": "[vllm.platform_plugins]\nattnlib_test = vllm_cpu_platform:platform\n",
    "attnlib_kv_format_example": "[attnlib.kv_formats]\n"
    "rotated4 = attnlib_kv_format_example.rotated4:ROTATED_4BIT\n",
}
"""Name -> entry points, of packages that are not installed."""
_FORMATS = HERE.parent.parent / "examples" / "attnlib-kv-format-example" / "src"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, tests of one process of engines run in one worker, and the longest begin first."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file, _, name = nodeid.partition("::")
            if not file.endswith("test_vllm_engine.py"):
                return nodeid
            return f"{file} {next((version for version in VLLM if version in name), '')}"

    config.option.loadscopereorder = False
    return Scheduler(config, log)


_LEFT_OUT = "TRITON_INTERPRET", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"
"""Environment variables. Without bytecode every process compiles a thousand modules of vLLM."""


@pytest.fixture(scope="session")
def hosts(request: pytest.FixtureRequest) -> Path:
    """The folder that `install.py` filled."""
    folder = request.config.getoption("--hosts")
    if folder is None:
        pytest.skip("needs vLLM: python tests/hosts/install.py DIR, then pytest --hosts DIR")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def environment(hosts: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Version of vLLM -> environment variables of a process that imports it."""
    site = tmp_path_factory.mktemp("platform")
    for package, entry_points in _PACKAGES.items():
        metadata = site / f"{package}-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text(entry_points)

    def variables(version: str, **more: str) -> dict[str, str]:
        own = (site, _FORMATS, HERE, HERE.parent.parent)
        path = (hosts / f"vllm-{version}", hosts / "packages", *own)
        kept = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
        return {
            **kept, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1",
            "ATTNLIB_TUNING": "off", **more,
        }  # fmt: skip

    return variables


@pytest.fixture(scope="session")
def models(environment: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny models, which the processes of one run share."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, unfinished = base / "models", base / "unfinished-models"
    with (base / "models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished.mkdir(exist_ok=True)
            run_script("models.py", environment(VLLM[0]), str(unfinished))
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def engine(environment: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run cases of `run_engine.py`, or of another script, under one release; returns their
    results."""

    def run(
        version: str, cases: dict[str, Any], script: str = "run_engine.py", **variables: str
    ) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("engine")
        (folder / "cases.json").write_text(json.dumps(cases))
        run_script(
            script, environment(version, **variables),
            str(folder / "cases.json"), str(folder / "results.json"),
        )  # fmt: skip
        found: dict[str, Any] = json.loads((folder / "results.json").read_text())
        return found

    return run


def run_script(name: str, environment: dict[str, str], *arguments: str) -> str:
    """Output of a script of this folder; its failure fails the test with its last lines."""
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments],
        env=environment, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, f"{name} failed:\n{log[-6000:]}"
    print(log[-3000:])
    return done.stdout
