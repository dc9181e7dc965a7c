"""Run the fast tests with the oldest and the newest versions that pyproject.toml allows.

    python3 .ci/versions.py prepare     # environments .ci-oldest and .ci-newest, five minutes each
    python3 .ci/versions.py test 600    # the fast tests in each, within 600 seconds

All tests run, of each at most CASES cases: another version changes what a test calls, seldom one
value of its parameters. oldest.txt and newest.txt name the releases. An environment that cannot be
had, because an interpreter, disk space or a package is missing, and tests that do not end in time,
are reported and do not fail the run; a test that fails does.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from interpreters import Unavailable, find_interpreter

ROOT = Path(__file__).resolve().parent.parent
PYTHON = {"oldest": "3.10", "newest": "3.14"}
"""Name of an environment -> its Python."""

UNFINISHED = "its preparation did not end"

NEEDED_BYTES = 12 << 30
"""Of one environment and its downloads: torch of the index has CUDA's libraries."""

LIMIT_SECONDS = 900
"""Of one command that prepares an environment."""

CASES = 2
"""Of one test with parameters: the first and the last."""

LEAST_SECONDS = 120
"""Of the tests of one environment; with less left they are not started."""


def main() -> int:
    if sys.argv[1:] == ["prepare"]:
        for name in PYTHON:
            prepare(name)
        return 0
    if sys.argv[1:2] == ["test"] and len(sys.argv) == 3:
        deadline = time.monotonic() + float(sys.argv[2])
        return max(test(name, deadline) for name in PYTHON)
    raise SystemExit(__doc__)


def prepare(name: str) -> None:
    """Make the environment `name`; a failure is left in a file for `test`."""
    started = time.perf_counter()
    place, reason = _place(name), _reason(name)
    shutil.rmtree(place, ignore_errors=True)
    reason.write_text(f"{UNFINISHED} ({name})\n")
    try:
        _make(name, place)
    except (Unavailable, OSError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "stderr", "") or "").strip().splitlines()[-3:]
        reason.write_text(" ".join([str(error), *output]) + "\n")
        shutil.rmtree(place, ignore_errors=True)
    else:
        reason.unlink()
    print(f"versions: {name} prepared in {time.perf_counter() - started:.0f} s", flush=True)


def _make(name: str, place: Path) -> None:
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        raise Unavailable(f"{free >> 30} GiB are free and {NEEDED_BYTES >> 30} are needed")
    python = find_interpreter(PYTHON[name], ROOT / f".ci-python{PYTHON[name]}")
    _run([python, "-m", "venv", "--clear", "--without-pip", place])
    # A wheel of pip runs itself; the machine's own pip may be too old for this Python.
    _run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, "pip"])
    (wheel,) = place.glob("pip-*.whl")
    _run([place / "bin/python", wheel / "pip", "install", "-q", wheel])
    # The file replaces the constraints of the machine, if it has any.
    pins = ROOT / ".ci" / f"{name}.txt"
    install = [place / "bin/python", "-m", "pip", "install", "-q", "--no-compile"]
    _run([*install, "-r", pins, "-e", f"{ROOT}[test]"], PIP_CONSTRAINT=str(pins))


def test(name: str, deadline: float = math.inf) -> int:
    """Run the fast tests; 1 if one fails, 0 if they pass or could not be run until `deadline`.

    Args:
        name: of the environment.
        deadline: value of `time.monotonic`.
    """
    place, reason = _place(name), _reason(name)
    while _is_preparing(name) and time.monotonic() < deadline - LEAST_SECONDS:
        time.sleep(1)
    left = max(0.0, deadline - time.monotonic())
    if reason.exists() or not place.exists() or left < LEAST_SECONDS:
        text = "it was not prepared" if left >= LEAST_SECONDS else f"{left:.0f} seconds were left"
        text = reason.read_text().strip() if reason.exists() else text
        print(f"versions: {name} (Python {PYTHON[name]}) WAS NOT RUN: {text}", flush=True)
        return 0
    show = "import sys, torch, transformers, triton; print('Python %d.%d.%d' % sys.version_info[:3]"
    show += ", *(m.__name__ + ' ' + m.__version__ for m in (torch, triton, transformers)))"
    subprocess.run([place / "bin/python", "-c", show], check=True, cwd=ROOT)
    started = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    environment["PATH"] = f"{place / 'bin'}:{os.environ['PATH']}"
    command = [place / "bin/python", "-m", "pytest", "-q", "--cases-per-test", str(CASES)]
    try:
        limit = None if left == math.inf else left
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"versions: {name} DID NOT END in {left:.0f} s, which were left", flush=True)
        return 0
    finally:
        shutil.rmtree(place, ignore_errors=True)  # seven gigabytes
    outcome = "passed" if done.returncode == 0 else "FAILED"
    print(f"versions: {name} {outcome} in {time.monotonic() - started:.0f} s", flush=True)
    return int(done.returncode != 0)  # negative where a signal ended it


def _is_preparing(name: str) -> bool:
    reason = _reason(name)
    return reason.exists() and reason.read_text().startswith(UNFINISHED)


def _place(name: str) -> Path:
    return ROOT / f".ci-{name}"


def _reason(name: str) -> Path:
    return ROOT / f".ci-{name}.reason"


def _run(command: list[object], **environment: str) -> None:
    subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_SECONDS,
    )


if __name__ == "__main__":
    sys.exit(main())
