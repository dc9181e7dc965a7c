"""The one command for a GPU machine: every part ends, whatever it does, and says how."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import load

script = load("foreign_exam")


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, parts: dict[str, str], *arguments: str
) -> tuple[int, dict[str, str]]:
    """Run parts that are Python one-liners: (exit code, part -> state)."""
    monkeypatch.setattr(
        script, "command_of", lambda part, stem, backends: [sys.executable, "-c", parts[part]]
    )
    monkeypatch.setenv("OUT", str(folder))
    monkeypatch.setattr(sys, "argv", ["foreign_exam.py", "--parts", *parts, *arguments])
    code = script.main()
    found = json.loads((folder / "foreign_exam.json").read_text())
    assert found["provenance"]["commit"]
    return code, {part["part"]: part["state"] for part in found["parts"]}


def test_a_part_that_hangs_or_fails_does_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = "import time; print('began', flush=True); time.sleep(60)"
    parts = {
        "verify:flashinfer": hangs,
        "verify:triton": "raise SystemExit(1)",
        "parity": "print('matrix')",
    }
    code, states = run(monkeypatch, tmp_path, parts, "--part-seconds", "1", "--label", "fa3")
    assert code == 1
    assert states == {
        "verify:flashinfer": "stopped after 1 s",
        "verify:triton": "failed, exit 1",
        "parity": "passed",
    }
    assert "began" in (tmp_path / "verify_flashinfer_fa3.txt").read_text()
    assert "matrix" in (tmp_path / "parity_fa3.txt").read_text()


def test_parts_without_time_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, states = run(monkeypatch, tmp_path, {"pytest": "pass"}, "--limit-seconds", "5")
    assert (code, states) == (1, {"pytest": "left out: no time"})


def test_commands_are_those_of_the_kit(tmp_path: Path) -> None:
    """What runs is the exam that users run, whole."""
    from attnlib.testing.commands import parity_parser, verify_parser

    for part, parser in (("verify:flashinfer", verify_parser()), ("parity", parity_parser())):
        command = script.command_of(part, tmp_path / "x", ["triton", "torch"])
        assert command[1:3] == ["-m", "attnlib"]
        read = parser.parse_args(command[4:])
        assert read.json == str(tmp_path / "x.json") and not getattr(read, "quick", False)
    with pytest.raises(ValueError, match="unknown part 'verify'"):
        script.command_of("verify", tmp_path / "x", [])
