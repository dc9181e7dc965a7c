"""Pairwise comparison: correct pairs pass, a wrong reader fails, unsupported cases do not pass."""

from __future__ import annotations

import json
import math

from attnlib.testing.outcome import Outcome
from attnlib.testing.parity import ParityCell, ParityReport, run_parity
from tests.testing.toy_backend import ToyBackend, ToyImpl, toy_with
from tests.testing.wrong_backends import OffByOneWindow, WritesSlotMinusOne

TORCH = "attnlib.backends.torch:TorchBackend"


def test_two_correct_backends_agree_in_every_ordered_pair() -> None:
    """K2: all ordered pairs, including each backend with itself."""
    report = run_parity([TORCH, ToyBackend], device="cpu")
    assert report.passed, str(report)
    pairs = {(cell.writer, cell.reader) for cell in report.cells}
    assert pairs == {(a, b) for a in ("torch", "toy") for b in ("torch", "toy")}
    assert all(cell.difference < 1e-4 for cell in report.cells if cell.outcome is Outcome.PASS)
    matrix = json.loads(report.to_json())["largest"]
    assert matrix["torch"]["torch"] == 0.0 and matrix["torch"]["toy"] == max(
        cell.difference
        for cell in report.cells
        if (cell.writer, cell.reader) == ("torch", "toy") and cell.outcome is Outcome.PASS
    )


def test_a_wrong_reader_fails_in_its_column() -> None:
    report = run_parity([ToyBackend, toy_with(OffByOneWindow)], device="cpu")
    assert not report.passed
    wrong = {(cell.reader, cell.case) for cell in report.cells if cell.outcome is Outcome.FAIL}
    assert wrong == {("OffByOneWindow", "window")}
    assert "FAIL toy writes, OffByOneWindow reads, window: out over budget" in str(report)


def test_unsupported_cases_are_not_passes() -> None:
    class Restricted(ToyImpl):
        """Correct, with few declared capabilities."""

    restricted = toy_with(Restricted, sink=False, alibi=False)
    report = run_parity([ToyBackend, restricted], device="cpu")
    unsupported = {
        (cell.writer, cell.case) for cell in report.cells if cell.outcome is Outcome.UNSUPPORTED
    }
    assert ("toy", "sinks") in unsupported
    assert "7/7" in str(report)
    assert "9/9" in str(report)


def test_a_wrong_writer_is_reported_in_the_json() -> None:
    """The JSON report and `passed` agree for a writer that overwrites a slot."""
    report = run_parity([toy_with(WritesSlotMinusOne), ToyBackend], device="cpu")
    assert {cell.case for cell in report.cells} >= {"decode", "fp8"}
    assert json.loads(report.to_json())["passed"] is report.passed


def test_a_pair_without_a_result_has_no_largest_difference() -> None:
    """The JSON has null for such a pair, and no NaN."""
    cells = [
        ParityCell("a", "b", "decode", Outcome.PASS, "", 0.25),
        ParityCell("a", "b", "window", Outcome.FAIL, "raised RuntimeError: no", math.nan),
        ParityCell("b", "a", "window", Outcome.FAIL, "raised RuntimeError: no", math.nan),
    ]
    report = ParityReport("cpu", ("a", "b"), tuple(cells))
    text = report.to_json()
    assert "NaN" not in text and json.loads(text)["largest"] == {
        "a": {"a": None, "b": 0.25},
        "b": {"a": None, "b": None},
    }
    assert "1/2  2.5e-01" in str(report) and "0/1  no result" in str(report)
