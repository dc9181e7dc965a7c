"""The `attnlib` command itself."""

from __future__ import annotations

import os
import subprocess
import sys
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
