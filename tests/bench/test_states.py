"""The suite of state layers: bytes of a step, and a run."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch

from attnlib.bench import states
from attnlib.bench.command import main
from attnlib.bench.peaks import Peaks
from attnlib.bench.state_steps import surrounding_bytes
from attnlib.bench.states import STATE_CASES, step_bytes

torch_step = import_module("attnlib.ops.torch.states.state_step")
torch_convolution = import_module("attnlib.ops.torch.states.short_convolution")
GDN = next(case.spec for case in STATE_CASES if case.name == "qwen3-next-decode-64x1")
STATE = 32 * 128 * 128 * 4
ROW = 2 * (16 + 32) * 128 + 2 * 32 * 4
OUTER = 2 * (16 + 32) * 128


def test_bytes_of_a_step() -> None:
    """A decode reads the state and half a chunk; each sixteenth one writes the state."""
    spec = GDN.replace(chunk_size=16)
    assert step_bytes(spec, 32, 1) == STATE + 2 * ROW + OUTER
    assert step_bytes(spec, 36, 1) == STATE + 6 * ROW + OUTER
    assert step_bytes(spec, 47, 1) == 2 * STATE + 16 * ROW + OUTER
    assert step_bytes(spec, 0, 32) == STATE + 32 * ROW + 32 * OUTER
    mean = sum(step_bytes(spec, 32 + n, 1) for n in range(16)) / 16
    assert mean == STATE * 17 / 16 + (7.5 + 1 + 15 / 16) * ROW + OUTER
    verified = spec.replace(max_rollback=3)
    assert step_bytes(verified, 32, 4) == STATE + 8 * ROW + 4 * OUTER


def test_names_are_unique() -> None:
    assert len({case.name for case in STATE_CASES}) == len(STATE_CASES) == 42


def test_bytes_around_a_recurrence() -> None:
    """A window of three rows is read, one row is written, and the output gate is read."""
    spec = next(case.spec for case in STATE_CASES if case.name == "qwen3-next-step-64x1")
    assert spec.conv_channels == 8192
    assert surrounding_bytes(spec, 1) == 2 * (4 * 8192 + 32 * 128)


def test_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(states, "measure_peaks", lambda device: Peaks(100.0, 100.0, 1.0, "none"))
    # A timed step is repeated, which the kernels do not refuse.
    monkeypatch.setattr(torch_step, "check_positions", lambda *given: None)
    small = {"num_heads": 2, "key_size": 16, "value_size": 16}
    monkeypatch.setitem(states._MODELS, "qwen3-next", small)
    target = tmp_path / "rows.json"
    arguments = ["qwen3-next-decode-1x1", "qwen3-next-verify-1x4", "--suite", "states"]
    assert main([*arguments, "--backends", "torch", "--device", "cpu", "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [row["case"] for row in rows] == arguments[:2]
    for row in rows:
        assert row["us"] > 0 and row["share"] == row["bound_us"] / row["us"]
    assert "qwen3-next-verify-1x4" in capsys.readouterr().out
    monkeypatch.setattr(torch_convolution, "check_positions", lambda *given: None)
    steps = ["qwen3-next-step-1x1", "--suite", "states", "--backends", "torch"]
    assert main([*steps, "--device", "cpu", "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [row["backend"] for row in rows] == ["torch", "torch, separate"]
    assert main(["nothing", "--suite", "states", "--device", "cpu"]) == 1
    assert torch.float32 in (case.spec.state_dtype for case in STATE_CASES)
