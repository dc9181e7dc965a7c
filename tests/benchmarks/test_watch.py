"""`benchmarks/hosts/watch.py` and `turns.py`: where a benchmark of an engine is."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "hosts"

_STALLS = """
import time
from watch import Watch
watch = Watch(interval=0.2, stalled=0.5)
with watch.part("short"):
    with watch.part("first"):
        pass
    time.sleep(1.2)
"""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import turns
    import watch

    return turns, watch


def test_a_part_that_stalls_is_repeated_with_its_stack(modules: Any) -> None:
    """Also after a part inside it that has ended."""
    command = [sys.executable, "-c", _STALLS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("-- ")]
    assert [line.split(",")[0].strip() for line in lines[:2]] == ["-- short", "-- short: first"]
    assert len(lines) >= 4 and lines[-1].startswith("-- short, ")
    assert 'File "<string>", line 8 in <module>' in done.stderr


def test_output_without_parts_has_no_place(modules: Any) -> None:
    """A stack that was cut is none, and the part is named without it."""
    _, watch = modules
    assert watch.where(["a kernel was compiled"]) == ""
    assert watch.where(["-- start ", "Thread 0x1 (most recent call first):"]) == "start"


def test_a_turn_ends_although_a_child_has_the_file(modules: Any, tmp_path: Path) -> None:
    """A process that is forked during a turn inherits the lock. One that waits names the last
    holder."""
    turns, watch = modules
    file, told = tmp_path / "turns", watch.Watch()
    with turns.turn(file, told, fcntl.LOCK_SH):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    began = time.monotonic()
    try:
        with turns.turn(file, told):
            assert time.monotonic() - began < 30
            assert file.read_text().split()[0] == str(os.getpid())
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_who_waits_names_the_last_holder(
    modules: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns, watch = modules
    file, told = tmp_path / "turns", watch.Watch()
    file.write_text("12 --backend FLASH_ATTN")
    with file.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        threading.Timer(0.5, lambda: fcntl.flock(other, fcntl.LOCK_UN)).start()
        with turns.turn(file, told), turns.turn(None, told):
            pass
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("-- waits ") and "was 12 --backend FLASH_ATTN" in line
