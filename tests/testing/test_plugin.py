"""The pytest options `--attnlib-backend` and `--attnlib-against`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _pytest(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "-c",
    ]
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    loaded = [] if _registered() else ["-p", "attnlib.testing.plugin"]
    return subprocess.run(
        [*command, str(tmp_path / "pytest.ini"), *loaded, *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def _registered() -> bool:
    from importlib.metadata import entry_points

    return any(point.value == "attnlib.testing.plugin" for point in entry_points(group="pytest11"))


@pytest.mark.slow
def test_the_option_runs_the_suite_without_a_test_file(tmp_path: Path) -> None:
    done = _pytest(
        tmp_path,
        "--attnlib-backend=tests.testing.toy_backend:ToyBackend",
        "--attnlib-only=W2,L3,G4",
        "--attnlib-quick",
        "--attnlib-device=cpu",
        "-rs",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "not run: needs a GPU" in done.stdout


@pytest.mark.slow
def test_a_failure_shows_the_message_and_the_reproduction_line(tmp_path: Path) -> None:
    (tmp_path / "wrong_one.py").write_text(
        "from tests.testing.toy_backend import toy_with\n"
        "from tests.testing.wrong_backends import OffByOneWindow\n"
        "Backend = toy_with(OffByOneWindow)\n"
    )
    done = _pytest(
        tmp_path,
        "--attnlib-backend=wrong_one:Backend",
        "--attnlib-only=W2/window-2-*",
        "--attnlib-quick",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "; expected" in done.stdout
    assert "reproduce: attnlib verify wrong_one:Backend --only W2/window-2-decode" in done.stdout
    assert "test_conformance" not in done.stdout.split("FAILURES")[1].split("short test summary")[0]


def test_without_the_option_the_plugin_imports_nothing(tmp_path: Path) -> None:
    """pytest loads the plugin in every project where attnlib is installed."""
    (tmp_path / "test_imports.py").write_text(
        "import sys\n\n\ndef test_imports():\n    assert 'torch' not in sys.modules\n"
    )
    done = _pytest(tmp_path, "test_imports.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["no_such_module:Backend"])
def test_a_bad_path_stops_the_run(tmp_path: Path, backend: str) -> None:
    done = _pytest(tmp_path, f"--attnlib-backend={backend}")
    assert done.returncode not in (0, 1)
    assert "no_such_module" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_wrong_backend_is_a_usage_error(tmp_path: Path) -> None:
    """D3: one line with the reason, no traceback of pytest."""
    done = _pytest(tmp_path, "--attnlib-backend=nowhere:Backend")
    assert done.returncode == 4 and "INTERNALERROR" not in done.stdout + done.stderr
    assert "ERROR: --attnlib-backend nowhere:Backend: " in done.stderr


@pytest.mark.slow
def test_pairs_without_a_test_file(tmp_path: Path) -> None:
    """The named backend writes and reads; the two do not run the suite."""
    done = _pytest(
        tmp_path,
        "--attnlib-backend=tests.testing.toy_backend:ToyBackend",
        "--attnlib-against=torch",
        "--attnlib-only=window,graph_decode",
        "--attnlib-device=cpu",
        "-rs",
        "-vv",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parity::torch-to-toy/window PASSED" in done.stdout
    assert "4 passed, 2 skipped" in done.stdout  # torch declares no graphs
    assert "unsupported: torch: " in done.stdout


@pytest.mark.slow
def test_a_wrong_pair_shows_the_rule_and_the_row(tmp_path: Path) -> None:
    (tmp_path / "wrong_one.py").write_text(
        "from tests.testing.toy_backend import toy_with\n"
        "from tests.testing.wrong_backends import OffByOneWindow\n"
        "Backend = toy_with(OffByOneWindow)\n"
    )
    done = _pytest(
        tmp_path,
        "--attnlib-backend=wrong_one:Backend",
        "--attnlib-against=all",
        "--attnlib-only=window",
        "--attnlib-device=cpu",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "torch writes, OffByOneWindow reads: M2: sliding window: out differs first in row 0 "
        "(token 0 of request 0, position 49), head 0" in done.stdout
    )
    assert "reproduce: attnlib parity torch wrong_one:Backend --only window" in done.stdout


@pytest.mark.slow
def test_a_wrong_name_among_the_others_is_a_usage_error(tmp_path: Path) -> None:
    done = _pytest(tmp_path, "--attnlib-against=nothing")
    assert done.returncode == 4 and "INTERNALERROR" not in done.stdout + done.stderr
    assert "ERROR: --attnlib-against nothing: " in done.stderr
