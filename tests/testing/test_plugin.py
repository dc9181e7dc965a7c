"""The third door: a pytest option and a base class."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnlib.testing.suite import BackendConformance
from tests.testing.toy_backend import ToyBackend, toy_with
from tests.testing.wrong_backends import IgnoredSoftCap

ROOT = Path(__file__).parents[2]


class TestToy(BackendConformance):
    """The base class, as a third party uses it."""

    backend = ToyBackend
    device = "cpu"
    quick = True
    only = "W2,K3,L1"


class TestWrongButExpected(BackendConformance):
    """Known failures are listed by case with a reason, strictly."""

    backend = toy_with(IgnoredSoftCap)
    device = "cpu"
    quick = True
    only = "F1/soft_cap-*,F1/scale-*"
    expected_failures = {
        "F1/soft_cap-decode": "the cap is not implemented",
        "F1/soft_cap-prefill": "the cap is not implemented",
    }


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


def test_the_option_adds_the_exam_without_any_test_file(tmp_path: Path) -> None:
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


def test_a_failure_prints_the_message_and_how_to_reproduce_it(tmp_path: Path) -> None:
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
    """Every project's pytest loads the plugin where attnlib is installed."""
    (tmp_path / "test_light.py").write_text(
        "import sys\n\n\ndef test_light():\n    assert 'torch' not in sys.modules\n"
    )
    done = _pytest(tmp_path, "test_light.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["no_such_module:Backend"])
def test_a_bad_path_stops_the_run(tmp_path: Path, backend: str) -> None:
    done = _pytest(tmp_path, f"--attnlib-backend={backend}")
    assert done.returncode not in (0, 1)
    assert "no_such_module" in done.stdout + done.stderr
