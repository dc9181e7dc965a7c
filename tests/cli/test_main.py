"""The `attnlib` command itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from attnlib.cli import main


def test_usage_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and "doctor" in capsys.readouterr().out
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("attnlib 0.")
    assert main(["dotcor"]) == 2 and "unknown command 'dotcor'" in capsys.readouterr().err


@pytest.mark.slow
def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attnlib", "explain", "--device", "cpu"],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0 and "attnlib chose torch" in done.stdout
