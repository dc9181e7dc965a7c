"""The example package: installed, found by entry point, chosen by environment, examined. And the one-file example."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "attnlib-plugin-example"

_CHOOSE = """
import torch, attnlib
assert "gather_sdpa" in attnlib.list_backends(), attnlib.list_backends()
spec = attnlib.AttentionSpec(num_heads=4, head_size=32, dtype=torch.float32)
chosen = attnlib.get_attn_backend(spec, device="cpu")
print(chosen.get_name(), chosen.__module__)
"""


def _run(arguments: list[str], site: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(ROOT)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example installed into a folder of its own, wheel and metadata included."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling builds the example's wheel: pip install 'attnlib[test]'")
    folder = tmp_path_factory.mktemp("site")
    command = [
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(folder),
    ]
    done = subprocess.run(
        [sys.executable, *command, str(EXAMPLE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_it_is_found_and_chosen_by_environment(site: Path) -> None:
    """X1: the entry point is enough."""
    done = _run(["-c", _CHOOSE], site, ATTNLIB_BACKEND="gather_sdpa")
    assert done.stdout.strip() == "gather_sdpa attnlib_plugin_example", done.stderr


def test_it_stays_out_of_auto(site: Path) -> None:
    """Installing a plugin changes nobody's backend."""
    done = _run(["-c", _CHOOSE], site, ATTNLIB_BACKEND="auto")
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith("gather_sdpa")


def test_it_passes_the_exam(site: Path) -> None:
    code = "import sys; from attnlib.testing.commands import verify_main; sys.exit(verify_main(['gather_sdpa', '--device', 'cpu']))"
    done = _run(["-c", code], site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "17/18 declared capabilities exercised" in done.stdout


def test_its_own_suite_is_one_class(site: Path) -> None:
    done = _run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "W2 or K3", str(EXAMPLE / "tests")],
        site,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_the_one_file_backend_passes(tmp_path: Path) -> None:
    path = ROOT / "examples" / "one_file_backend.py"
    done = _run(["-m", "attnlib", "verify", f"{path}:OneFileBackend", "--device", "cpu"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("PASSED")
