"""The `attnlib` command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from attnlib.cli import main


def test_usage_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and "doctor" in capsys.readouterr().out
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("attnlib 0.")
    assert (
        main(["dotcor"]) == 2
        and "unknown command 'dotcor'; did you mean 'doctor'?" in capsys.readouterr().err
    )


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("command", ["", "--help", "--version", "list", "list --help", "run -h"])
def test_output_that_cannot_be_written(
    command: str,
    is_buffered: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A reader that has ended, as `head` does, and a full disk: no traceback, also at exit."""
    reader, writer = os.pipe()
    os.close(reader)
    for target in (writer, os.open("/dev/full", os.O_WRONLY)):
        stream = TextIOWrapper(open(target, "wb", 8192), "utf-8", write_through=not is_buffered)
        monkeypatch.setattr(sys, "stdout", stream)
        status = main(command.split())
        stream.close()  # as the interpreter does when it ends
        if is_buffered or "list -" not in command:  # argparse hides errors of its help
            assert status == (1 if target == writer else 2)
        assert ("No space left on device" in capsys.readouterr().err) is (status == 2)


def test_output_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terminals without UTF-8 get escapes of what they lack, also for bytes in names of files."""
    stream = TextIOWrapper(BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["bench", "--suite", "cpu", "--list"]) == 0
    assert main(["replay", "caf\udce9.pt", "torch"]) == 2
    stream.flush()
    shown = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert r" \xb7 " in shown and r"caf\udce9.pt" in shown


def test_a_current_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["list", "--device", "cpu"]) == 2
    assert "attnlib list: the current folder was removed" in capsys.readouterr().err


@pytest.mark.slow
def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attnlib", "explain", "--device", "cpu"],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0 and "attnlib chose torch" in done.stdout


OWN = """
from attnlib.backends.torch import TorchBackend


class MyBackend(TorchBackend):
    @staticmethod
    def get_name():
        return "mine"
"""


@pytest.mark.parametrize("given", ["my_own_attention:MyBackend", "own/attention_of.py:MyBackend"])
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("explain --device cpu --backend GIVEN", "attnlib chose mine"),
        ("explain --device cpu", "attnlib chose mine"),
        ("verify GIVEN --device cpu --quick --only D2 --against GIVEN", "PASSED"),
        ("parity GIVEN torch --device cpu", "mine"),
        ("bench q1s16 --device cpu --kernels-only --backends GIVEN", "backends: GIVEN"),
    ],
)
def test_every_command_finds_a_class_of_the_current_folder(
    command: str,
    shown: str,
    given: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """D3: one syntax, in options and in ATTNLIB_BACKEND; the import path stays as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    for name in ("my_own_attention", "attention_of"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "my_own_attention.py").write_text(OWN)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "attention_of.py").write_text(OWN)
    if "GIVEN" not in command:
        monkeypatch.setenv("ATTNLIB_BACKEND", given)
    assert main(command.replace("GIVEN", given).split()) == 0
    assert shown.replace("GIVEN", given) in capsys.readouterr().out
    assert str(tmp_path) not in sys.path
