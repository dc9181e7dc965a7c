"""The example package and the one-file example."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fresh_process import run_module, run_program

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "attnlib-plugin-example"
FORMAT_EXAMPLE = ROOT / "examples" / "attnlib-kv-format-example"

_SELECT = """
import os
import torch, attnlib
assert "gather_sdpa" in attnlib.list_backends(), attnlib.list_backends()
spec = attnlib.AttentionSpec(num_heads=4, head_size=32, dtype=torch.float32)
for name in ("gather_sdpa", "auto"):
    os.environ["ATTNLIB_BACKEND"] = name
    backend = attnlib.get_attn_backend(spec, device="cpu")
    print(name, backend.get_name(), backend.__module__)
"""


def _run(arguments: list[str], site: Path, **env: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    if arguments[0] == "-c":
        return run_program(arguments[1], given, [site, ROOT], site)
    return run_module(arguments[1], arguments[2:], given, [site, ROOT], site)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example packages, built and installed into a separate folder."""
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
        [sys.executable, *command, str(EXAMPLE), str(FORMAT_EXAMPLE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_package_is_selected_by_name_only(site: Path) -> None:
    """X1: the entry point registers the backend; automatic selection does not use it."""
    done = _run(["-c", _SELECT], site)
    assert done.returncode == 0, done.stderr
    by_name, automatic = done.stdout.splitlines()
    assert by_name == "gather_sdpa gather_sdpa attnlib_plugin_example"
    assert automatic.startswith("auto ") and "gather_sdpa" not in automatic


@pytest.mark.slow
def test_the_package_passes_the_conformance_suite(site: Path) -> None:
    done = _run(["-m", "attnlib", "verify", "gather_sdpa", "--device", "cpu"], site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "17/18 declared capabilities exercised" in done.stdout


@pytest.mark.slow
def test_the_test_suite_of_the_package_passes(site: Path) -> None:
    done = _run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "W2 or K3", str(EXAMPLE / "tests")],
        site,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


_SERVE = """
import torch
from attnlib.cli.demo.plain_blocks import PlainBlocks
from attnlib.cli.demo.scheduler import Request, Scheduler
from attnlib.cli.demo.serve import serve
from attnlib.integrations.transformers.paged_model import PagedModel
from tests.integrations.tiny_models import decoder, prompts

fields = {"kv_cache_dtype": "example:rotated4", "kv_rotation": "hadamard"}
paged = PagedModel(decoder("llama"), num_blocks=16, block_size=8, backend="torch", **fields)
requests = [Request(0, prompts(9)[0], 4)]
serve(paged, Scheduler(PlainBlocks(16, 8), 16, 8), requests)
print(len(requests[0].generated), *{cache.format_name for _, cache in paged.layers()})
"""


@pytest.mark.slow
def test_the_format_package_is_found_verified_and_serves_a_model(site: Path) -> None:
    """By its name alone: the entry point imports it."""
    done = _run(["-c", _SERVE], site)
    assert done.stdout.split() == ["4", "example:rotated4"], done.stderr
    done = _run(["-m", "attnlib", "verify", "--kv-format", "example:rotated4"], site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed · 0 unsupported · 0 not run" in done.stdout
    tests = str(FORMAT_EXAMPLE / "tests")
    done = _run(["-m", "pytest", "-q", "-p", "no:cacheprovider", tests], site)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_one_file_backend_passes(tmp_path: Path) -> None:
    path = ROOT / "examples" / "one_file_backend.py"
    done = _run(["-m", "attnlib", "verify", f"{path}:OneFileBackend", "--device", "cpu"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("PASSED")
