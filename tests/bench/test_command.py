"""The command `attnlib bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attnlib.bench import command, timer
from attnlib.bench.peaks import Peaks, measure_peaks
from attnlib.bench.results import read_document
from attnlib.bench.timing import DeviceLostError
from attnlib.cli import main

SMALL = "2q1s40@heads=4/2,d=16,dtype=float32"
OTHER = "q30@heads=4/2,d=16,dtype=float32"
HERE = "tests.bench.backends"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "_ROUND_US", 100.0)
    monkeypatch.setattr(
        command, "measure_peaks", lambda device: Peaks(10.0, 9.0, 0.1, "no product")
    )


def test_a_run_prints_and_writes_case_by_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bench.json"
    assert (
        main(
            ["bench", SMALL, OTHER, "--device", "cpu", "--json", str(target), "--commit", "abc1234"]
        )
        == 0
    )
    shown = capsys.readouterr()
    assert (
        f"{SMALL}: 2q1s40 · 4/2 heads of 16, page 16, float32" in shown.out
        and "2 rows · 2 ok" in shown.out
    )
    assert (
        "unavailable: flashinfer (flashinfer is not installed" in shown.out
        and "[1/2, " in shown.err
    )
    document = read_document(target)
    assert [row.case for row in document.rows] == [SMALL, OTHER] and all(
        row.us for row in document.rows
    )
    facts = document.runs[0].provenance
    assert facts["commit"] == "abc1234" and facts["command"].startswith(
        "attnlib bench 2q1s40@heads=4/2,d=16"
    )
    assert {"torch", "triton", "date", "cpu", "attnlib", "packages"} <= set(
        facts
    ) and document.runs[0].peaks["read_gbps"] == 9.0


@pytest.mark.slow
def test_wrong_and_failing_backends_set_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", SMALL, "--device", "cpu", "--backends", f"torch,{HERE}:WrongRow"]) == 1
    assert "WRONG: out over budget" in capsys.readouterr().out
    assert main(["bench", SMALL, "--device", "cpu", "--backends", f"torch,{HERE}:Broken"]) == 1
    assert "failed: RuntimeError: no kernel image" in capsys.readouterr().out
    assert (
        main(["bench", SMALL, "--device", "cpu", "--backends", "torch,flashinfer", "--eager"]) == 0
    )
    assert "unavailable: flashinfer is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode-9x9"], "names that --list shows nor a batch"),
        (["--backends", "tirton"], "Did you mean 'triton'"),
        (["--device", "sm_90"], "run on a machine that has it"),
        (["--from-json", "/no/such/file.json"], "'/no/such/file.json' does not exist"),
        (["--from-json", __file__], "cannot be read as a result"),
    ],
)
def test_invalid_arguments_are_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if "--device" in arguments else ["--device", "cpu"]
    assert main(["bench", *arguments, *device]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "--device", "cuda"]) == 2 and "is not available" in capsys.readouterr().err
    )


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--suite", "anchors", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(
        lines
    ) == 32 and "decode-ragged48                decode   48 requests of " in "\n".join(lines)
    assert main(["bench", "--list", "prefill-*-p128", "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_the_time_limit_lists_what_was_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bench.json"
    assert (
        main(
            [
                "bench",
                SMALL,
                OTHER,
                "--device",
                "cpu",
                "--limit-seconds",
                "0",
                "--json",
                str(target),
            ]
        )
        == 0
    )
    assert f"not run (the limit of 0 s was reached): {SMALL} {OTHER}" in capsys.readouterr().out
    assert [row.status for row in read_document(target).rows] == ["not run", "not run"]


@pytest.mark.slow
def test_cases_are_called_first_in_other_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process calls its own cases, and the measurement follows them."""
    monkeypatch.setenv("NOTED_CALLS", str(tmp_path))
    given = ["bench", SMALL, OTHER, f"--backends={HERE}:Noted", "--device=cpu", "--compile-jobs=4"]
    assert main(given) == 0
    assert capsys.readouterr().out.startswith("compiled in 2 processes: ")
    batches = [sorted(set(file.read_text().split())) for file in tmp_path.iterdir()]
    assert sorted(batches) == [["2"], ["2", "30"], ["30"]]  # this process measures both


def test_a_lost_device_ends_the_run_and_keeps_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = command.measure_case

    def breaks(case, *args, **kwargs):
        if case.name == OTHER:
            raise DeviceLostError("triton broke the device: illegal memory access")
        return original(case, *args, **kwargs)

    monkeypatch.setattr(command, "measure_case", breaks)
    target = tmp_path / "bench.json"
    assert (
        main(
            [
                "bench",
                SMALL,
                OTHER,
                "q1s5@heads=1,d=16,dtype=float32",
                "--device",
                "cpu",
                "--json",
                str(target),
            ]
        )
        == 1
    )
    assert [row.status for row in read_document(target).rows] == ["ok", "failed", "not run"]
    assert "measure the rest in a new process" in capsys.readouterr().out


@pytest.mark.slow
def test_results_are_merged_printed_and_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'attnlib[bench]'")
    parts = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for part, case in zip(parts, (SMALL, OTHER), strict=True):
        assert main(["bench", case, "--device", "cpu", "--json", part]) == 0
    capsys.readouterr()
    whole, figures = tmp_path / "whole.json", tmp_path / "figures"
    assert (
        main(["bench", "--from-json", *parts, "--json", str(whole), "--figures", str(figures)]) == 0
    )
    assert SMALL in (shown := capsys.readouterr().out) and OTHER in shown
    document = read_document(whole)
    assert [row.run for row in document.rows] == [0, 1] and len(document.runs) == 2
    assert sorted(path.name for path in figures.iterdir()) == [
        "decode.png",
        "decode.svg",
        "prefill.png",
        "prefill.svg",
    ]
    assert json.loads(whole.read_text())["version"] == 2


def test_figures_need_matplotlib_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setattr(command, "measure_case", lambda *args, **kwargs: pytest.fail("measured"))
    assert main(["bench", SMALL, "--device", "cpu", "--figures", str(tmp_path)]) == 2
    assert "pip install 'attnlib[bench]'" in capsys.readouterr().err


def test_peaks_are_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_peaks(torch.device("cpu"))
    assert (
        0.1 < found.copy_gbps < 10_000
        and 0.1 < found.read_gbps < 10_000
        and 1e-4 < found.matmul_tflops < 1000
    )
