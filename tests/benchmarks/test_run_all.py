"""The script that runs all GPU measurements: its commands exist."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import load

script = load("run_all")
ROOT = Path(__file__).resolve().parents[2]


def _run(
    monkeypatch: pytest.MonkeyPatch, out: Path, programs: dict[str, str], *arguments: str
) -> tuple[int, dict[str, str]]:
    """Run steps that are Python programs: (exit status, step -> state)."""
    files = {name: out.parent / f"{name}.py" for name in programs}
    for name, program in programs.items():
        files[name].write_text(program)
    steps = tuple(script.Step(name, str(file), "a test") for name, file in files.items())
    monkeypatch.setattr(script, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--out", str(out), *arguments])
    code = script.main()
    found = json.loads((out / "run_all.json").read_text())
    assert found["provenance"]["commit"]
    return code, {step["name"]: step["state"] for step in found["steps"]}


def test_steps_without_time_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, states = _run(monkeypatch, tmp_path / "out", {"one": "pass"}, "--limit-seconds", "5")
    assert (code, states) == (1, {"one": "not run: no time"})


def test_selected_steps_run_and_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = {"one": "pass", "two": "pass"}
    code, states = _run(monkeypatch, tmp_path / "out", programs, "--only", "two")
    assert (code, states) == (0, {"two": "passed"})


def test_devices_and_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = "import os; raise SystemExit(os.environ['CUDA_VISIBLE_DEVICES'] not in ('0', '3'))"
    out = tmp_path / "out"
    arguments = ("--devices", "0", "3", "--commit", "abc")
    code, states = _run(monkeypatch, out, {"one": program, "two": program}, *arguments)
    assert (code, states) == (0, {"one": "passed", "two": "passed"})
    assert json.loads((out / "run_all.json").read_text())["provenance"]["commit"] == "abc"


def test_processes_are_passed_to_the_commands_that_take_them() -> None:
    options = {step.name: step.arguments(ROOT, jobs=7)[-1] for step in script.STEPS}
    expected = {"coverage": "--compile-jobs=7", "verify_triton": "--jobs=7", "tests": "-n7"}
    assert options.items() >= expected.items()
    assert options["demo"] == "demo"


@pytest.mark.parametrize("step", script.STEPS, ids=lambda step: step.name)
def test_commands_parse(step: script.Step, tmp_path: Path) -> None:
    """Each step runs a script of the tree, or a command of attnlib whole (not --quick)."""
    from attnlib.bench.command import parser as bench_parser
    from attnlib.bench.suites import choose_cases
    from attnlib.testing.commands import parity_parser, verify_parser

    parsers = {"bench": bench_parser, "verify": verify_parser, "parity": parity_parser}
    arguments = step.arguments(tmp_path, jobs=2)
    (tmp_path / "bench.json").touch()  # a file of an earlier step
    if arguments[:2] == ["-m", "attnlib"]:
        command = arguments[2]
        if command in parsers:
            options = parsers[command]().parse_args(arguments[3:])
            assert not getattr(options, "quick", False)
            if command == "bench":
                assert choose_cases(options.cases, options.suite, "anchors")
        else:
            assert arguments[2:] == ["demo"]
    elif arguments[0] != "-m":
        assert (ROOT / arguments[0]).is_file()
    elif arguments[1] != "pytest":
        assert (ROOT / (arguments[1].replace(".", "/") + ".py")).is_file()
    parts = [part for argument in arguments for part in argument.split(",")]
    named = [part.partition(":")[0] for part in parts if ".py:" in part]
    assert all((ROOT / file).is_file() for file in named)


def test_the_list_shows_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--list"])
    assert script.main() == 0
    printed = capsys.readouterr().out
    assert all(f"python {step.command}" in printed for step in script.STEPS)
