"""The jobs of CI with the oldest and the newest versions: pins, interpreters, what is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.conftest import some_cases

ROOT = Path(__file__).parent.parent


@pytest.fixture
def ci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """`.ci/versions.py`, with its environments in a temporary folder."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    for name in ("interpreters", "versions"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import versions  # type: ignore[import-not-found]

    monkeypatch.setattr(versions, "ROOT", tmp_path)
    for name in ("interpreters", "versions"):  # importing them elsewhere finds other modules
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    return versions


def _pins(name: str) -> dict[str, str]:
    text = (ROOT / ".ci" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([a-z]+)==(\S+)$", text, re.M))


def test_the_jobs_are_the_bounds_of_the_package(ci: ModuleType) -> None:
    """The oldest job has the lower bounds of pyproject.toml, the newest one is within the upper."""
    text = (ROOT / "pyproject.toml").read_text()
    oldest, newest = _pins("oldest"), _pins("newest")
    assert oldest.keys() == newest.keys() == {"torch", "triton", "transformers"}
    for name, version in oldest.items():
        (bound,) = set(re.findall(rf'"{name}>=([\d.]+)', text))
        assert version.removesuffix(".0") == bound
        assert [int(x) for x in newest[name].split(".")] > [int(x) for x in version.split(".")]
    (below,) = re.findall(r'"triton>=[\d.]+,<([\d.]+);', text)
    assert newest["triton"].rsplit(".", 1)[0] == f"3.{int(below.split('.')[1]) - 1}"
    first, after = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', text).groups()  # type: ignore[union-attr]
    assert ci.PYTHON == {"oldest": f"3.{first}", "newest": f"3.{int(after) - 1}"}


def test_the_page_names_the_versions_of_the_jobs(ci: ModuleType) -> None:
    text = (ROOT / "docs" / "tested-configurations.md").read_text()
    row = rf"^\| CI, fast tests, {ci.CASES} cases of each \| (.*) \|$"
    listed = re.findall(row, text, re.M)
    assert listed == [" | ".join([ci.PYTHON[name], *_pins(name).values()]) for name in ci.PYTHON]


def test_an_environment_that_cannot_be_had_is_reported(
    ci: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on, and the log says which versions were not tested and why."""

    def fail(name: str, place: Path) -> None:
        place.mkdir()
        raise subprocess.CalledProcessError(1, ["pip"], stderr="no matching distribution")

    monkeypatch.setattr(ci, "_make", fail)
    ci.prepare("newest")
    assert ci.test("newest") == 0
    printed = capsys.readouterr().out
    assert "versions: newest (Python 3.14) WAS NOT RUN: Command '['pip']'" in printed
    assert "no matching distribution" in printed
    assert ci.test("oldest") == 0
    assert "oldest (Python 3.10) WAS NOT RUN: it was not prepared" in capsys.readouterr().out


def test_a_preparation_that_breaks_is_not_waited_for(
    ci: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk may be full, or a program missing, while files are written."""

    def fail(name: str, place: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ci, "_make", fail)
    ci.prepare("oldest")
    assert not ci._is_preparing("oldest") and ci.test("oldest") == 0
    assert "WAS NOT RUN: [Errno 28] No space left on device" in capsys.readouterr().out


def test_too_little_disk_space_is_a_reason(
    ci: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ci, "NEEDED_BYTES", 1 << 62)
    ci.prepare("oldest")
    ci.test("oldest")
    assert "WAS NOT RUN: " in (text := capsys.readouterr().out) and "GiB are free and" in text


@pytest.mark.parametrize(("end", "status"), [("exit 0", 0), ("exit 1", 1), ("kill -9 $$", 1)])
def test_the_result_is_that_of_the_tests(
    ci: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    end: str,
    status: int,
) -> None:
    python = _environment(tmp_path, end)
    monkeypatch.setattr(sys, "argv", ["versions.py", "test", "600"])
    assert ci.main() == status
    printed = capfd.readouterr().out
    assert f"versions: oldest {'FAILED' if status else 'passed'} in " in printed
    assert not python.exists()


def _environment(folder: Path, command: str) -> Path:
    """An environment whose interpreter runs `command` for pytest."""
    python = folder / ".ci-oldest/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$2" = pytest ] || {{ echo versions; exit 0; }}\n{command}\n')
    python.chmod(0o755)
    return python


NOW = 1000.0


def _stop_the_clock(
    ci: ModuleType, monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None] | None = None
) -> None:
    monkeypatch.setattr(ci, "time", SimpleNamespace(monotonic=lambda: NOW, sleep=sleep))


def test_some_cases_of_each_test_run_with_other_versions() -> None:
    """The first, the last and others between them; a test without parameters is one case."""

    def cases(*names: str) -> list[Any]:
        return [SimpleNamespace(nodeid=name) for name in names]

    many, few = [f"a.py::test[{n}]" for n in range(9)], ["a.py::A::test[x]", "a.py::A::test[y]"]
    found = some_cases(cases(*many, *few, "b.py::test"), 4)
    assert [item.nodeid for item in found] == [*(many[n] for n in (0, 2, 5, 8)), *few, "b.py::test"]
    assert [item.nodeid for item in some_cases(cases(*many), 1)] == many[:1]


def test_tests_end_with_the_time(
    ci: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ci, "LEAST_SECONDS", 0.1)
    _stop_the_clock(ci, monkeypatch)
    _environment(tmp_path, "exec sleep 600")
    assert ci.test("oldest", NOW + 1.0) == 0
    assert "versions: oldest DID NOT END in 1 s" in capfd.readouterr().out
    _environment(tmp_path, "exit 1")
    assert ci.test("oldest", NOW) == 0
    assert "oldest (Python 3.10) WAS NOT RUN: 0 seconds were left" in capfd.readouterr().out


def test_an_environment_in_preparation_is_waited_for(
    ci: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ci, "LEAST_SECONDS", 0.0)
    _environment(tmp_path, "exit 1")
    reason = tmp_path / ".ci-oldest.reason"
    reason.write_text(f"{ci.UNFINISHED} (oldest)\n")
    _stop_the_clock(ci, monkeypatch, lambda seconds: reason.unlink(missing_ok=True))
    assert ci.test("oldest", NOW + 600.0) == 1


def test_an_installed_interpreter_is_used(ci: ModuleType, tmp_path: Path) -> None:
    interpreters = sys.modules["interpreters"]
    assert interpreters.runs(Path(sys.executable), ".".join(map(str, sys.version_info[:2])))
    assert not interpreters.runs(Path(sys.executable), "3.9")
    assert not interpreters.runs(tmp_path / "python", "3.14")


def test_an_interpreter_that_no_package_has_is_unavailable(
    ci: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreters = sys.modules["interpreters"]

    def run(command: Any, folder: Path) -> str:
        return "python9.9:\n  Candidate: (none)\n"

    monkeypatch.setattr(interpreters, "_run", run)
    monkeypatch.setattr(interpreters, "_apt_options", lambda folder, suite: [])
    with pytest.raises(
        interpreters.Unavailable, match=r"9\.9 is not installed.*sid have no python"
    ):
        interpreters.find_interpreter("9.9", tmp_path / "unpacked")
