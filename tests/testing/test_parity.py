"""Pairwise comparison: correct pairs pass, a wrong reader fails, unsupported cases do not pass."""

from __future__ import annotations

import json
import math

import pytest

from attnlib.capabilities import Sizes
from attnlib.errors import ContractError
from attnlib.testing.outcome import Outcome
from attnlib.testing.pair_run import ParityCell
from attnlib.testing.parity import ParityReport, make_pairs, run_parity
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
    assert (
        "FAIL toy writes, OffByOneWindow reads, window: M2: sliding window: out differs first in "
        "row 0 (token 0 of request 0, position 49), head 0, element 0: " in str(report)
    )


def test_unsupported_cases_are_not_passes() -> None:
    class Restricted(ToyImpl):
        """Correct, with few declared capabilities."""

    restricted = toy_with(Restricted, sink=False, alibi=False)
    report = run_parity([ToyBackend, restricted], device="cpu")
    unsupported = {
        (cell.writer, cell.case) for cell in report.cells if cell.outcome is Outcome.UNSUPPORTED
    }
    assert ("toy", "sinks") in unsupported
    assert "16/16" in str(report)  # 3 of 19 calls have sinks or ALiBi
    assert "19/19" in str(report)


def test_a_wrong_writer_is_reported_in_the_json() -> None:
    """P4: a write for slot -1 is a failure of the writer, although no reader sees it."""
    report = run_parity([toy_with(WritesSlotMinusOne), ToyBackend], device="cpu")
    data = json.loads(report.to_json())
    assert data["passed"] is report.passed is False
    failed = [cell for cell in data["cells"] if cell["outcome"] == "fail"]
    assert {(cell["writer"], cell["case"]) for cell in failed} == {
        ("WritesSlotMinusOne", "empty_rows"),
    }
    assert all("P4: the cache of WritesSlotMinusOne" in cell["message"] for cell in failed)


def test_a_pair_without_a_result_has_no_largest_difference() -> None:
    """The JSON has null for such a pair, and no NaN."""
    cells = [
        ParityCell("a", "b", "decode", "M1", Outcome.PASS, "", 0.25),
        ParityCell("a", "b", "window", "M2", Outcome.FAIL, "raised RuntimeError: no", math.nan),
        ParityCell("b", "a", "window", "M2", Outcome.FAIL, "raised RuntimeError: no", math.nan),
    ]
    report = ParityReport("cpu", ("a", "b"), tuple(cells))
    text = report.to_json()
    assert "NaN" not in text and json.loads(text)["largest"] == {
        "a": {"a": None, "b": 0.25},
        "b": {"a": None, "b": None},
    }
    assert "1/2  2.5e-01" in str(report) and "0/1  no result" in str(report)


def test_pairs_of_named_backends_with_others() -> None:
    """Each named backend with itself and, in both directions, with the others; not these alone."""
    calls = make_pairs([ToyBackend], ["torch"], device="cpu", only="decode")
    assert [(pair.id, case.name) for pair, case in calls] == [  # type: ignore[union-attr]
        ("toy-to-toy", "decode"), ("toy-to-torch", "decode"), ("torch-to-toy", "decode"),
    ]  # fmt: skip
    everything = make_pairs([ToyBackend], ["all"], device="cpu", only="decode")
    assert {pair.id for pair, _ in everything} >= {"toy-to-torch", "torch-to-toy"}
    assert "torch-to-torch" not in {pair.id for pair, _ in everything}
    calls = make_pairs([ToyBackend, "torch"], ["all"], device="cpu", only="window,sinks")
    assert len(calls) >= 8 and {case.name for _, case in calls} == {"window", "sinks"}  # type: ignore[union-attr]


def test_wrong_names_of_calls_and_backends_are_refused() -> None:
    with pytest.raises(ContractError, match="no call matches 'windows': the calls are decode, "):
        make_pairs([ToyBackend], device="cpu", only="decode,windows")
    other = type("Other", (ToyBackend,), {})
    with pytest.raises(ContractError, match="toy names two classes"):
        make_pairs([ToyBackend], [other], device="cpu")


def test_backends_without_a_common_case_are_unsupported() -> None:
    """The reasons are in the report; such a pair does not pass."""
    wide = toy_with(type("Wide", (ToyImpl,), {}), head_sizes=Sizes(512, 512, 1))
    report = run_parity([ToyBackend, wide], device="cpu")
    (cell,) = (cell for cell in report.cells if (cell.writer, cell.reader) == ("toy", "Wide"))
    assert cell.outcome is Outcome.UNSUPPORTED and "none of the common cases" in cell.message
