"""Any backend can have its parameters tuned: `attnlib tune` knows tuners, not backends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import attnlib
from attnlib import tuning
from attnlib.backends.torch import TorchBackend
from attnlib.backends.triton import TritonBackend
from attnlib.bench import timer
from attnlib.bench.backends import find_backends
from attnlib.bench.case_text import parse_case
from attnlib.cli import main
from attnlib.cli.tune.session import find_tuners
from attnlib.device import DeviceInfo
from attnlib.selection import unregister_backend
from attnlib.tuning.measure import measure_operation
from tests.tuning import toy_backend
from tests.tuning.toy_backend import ToyBackend, ToyTuner

CPU = torch.device("cpu")
SMALL = ["--num-heads", "4", "--num-kv-heads", "2", "--head-size", "32", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "_ROUND_US", 200.0)


@pytest.fixture
def toy() -> Iterator[None]:
    attnlib.register_backend("toy", ToyBackend)
    yield
    unregister_backend("toy")


def test_only_backends_that_implement_the_hook_have_a_tuner(toy: None) -> None:
    assert TorchBackend.tuner(CPU) is None
    assert TritonBackend.tuner(CPU) is None, "the times of the interpreter mean nothing"
    assert list(find_tuners([], CPU)) == ["toy"]


def test_a_backend_given_by_path_is_tuned_without_registration() -> None:
    found = find_backends(["tests.tuning.toy_backend:ToyBackend"], CPU)
    assert list(find_tuners(found, CPU)) == ["toy"]


def test_the_command_tunes_a_third_party_backend(
    toy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates are checked, timed and written; the backend reads the table back."""
    out = tmp_path / "cpu.json"
    words = ["tune", "--device", "cpu", *SMALL, "--backends", "none", "--out", str(out)]
    assert main([*words, "--shapes", "q1s24,q9,q1s24_q19", "--ops", "attend"]) == 0
    printed = capsys.readouterr().out
    assert "[1/2, " in printed and "toy attend on q1s24@spec" in printed
    assert "q1s24_q19" not in printed, "the tuner has no group for mixed batches"
    assert "us  passes 3  current" in printed and "passes 0: wrong: out over budget" in printed
    assert "passes many: TypeError" in printed
    assert f"wrote 2 parameter lines and 0 rankings to {out}" in printed
    lines = json.loads(out.read_text())["parameters"]["toy"]
    assert [line["group"] for line in lines] == [
        "decode of head size 32",
        "prefill of head size 32",
    ]
    for line, case in zip(lines, ("q1s24@spec", "q9@spec"), strict=True):
        assert line["parameters"] == {"passes": 1}
        assert line["measured"][case]["us"] < line["measured"][case]["before_us"]
    assert toy_backend.current == {"passes": 3}, "measuring leaves no parameters behind"
    monkeypatch.setenv("ATTNLIB_TUNING", str(out))
    tuning.clear_cache()
    read = ToyBackend.tuned_parameters(DeviceInfo("cpu"))
    assert read["decode of head size 32"] == {"passes": 1}


def test_new_lines_replace_those_of_the_same_group(toy: None, tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    words = ["tune", "--device", "cpu", *SMALL, "--backends", "none", "--out", str(out)]
    assert main([*words, "--shapes", "q1s24"]) == 0
    assert main([*words, "--shapes", "q1s30"]) == 0
    (line,) = json.loads(out.read_text())["parameters"]["toy"]
    assert list(line["measured"]) == ["q1s30@spec"]


def test_unknown_operations_are_named(
    toy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", "--device", "cpu", "--ops", "atend", "--out", str(tmp_path / "x.json")]
    assert main(words) == 2
    assert "--ops atend is unknown; write attend, or none" in capsys.readouterr().err


def test_measuring_stops_when_time_is_over_and_can_be_short() -> None:
    case = parse_case("q1s24@heads=4/2,d=16,dtype=float32")
    seen: list[str] = []
    stopped = measure_operation(
        ToyTuner(),
        case,
        "attend",
        CPU,
        expired=lambda: True,
        on_trial=lambda trial: seen.append(trial.case),
    )
    assert [trial.is_current for trial in stopped] == [True] and seen == [case.name]
    assert len(measure_operation(ToyTuner(), case, "attend", CPU)) == 4
