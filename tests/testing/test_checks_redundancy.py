"""Two checks detect each error of `wrong_backends` and `wrong_states`."""

from __future__ import annotations

import re

import pytest

from tests.testing import redundancy
from tests.testing.redundancy import ERRORS, failed_checks, main, undetected_without

FAST = (
    "written slot -1", "mapping length ignored", "score function after the mask",
    "soft cap after the mask", "query tokens from 64 on",
)  # fmt: skip


@pytest.mark.parametrize("error", FAST)
def test_two_checks_detect_the_error(error: str) -> None:
    assert len(failed_checks(error, most=2)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("error", [error for error in ERRORS if error not in FAST])
def test_two_checks_detect_every_other_error(error: str) -> None:
    assert len(failed_checks(error, most=2)) == 2


def test_where_a_search_begins_does_not_change_what_it_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the recorded cases are those of other errors, or no longer exist."""
    error, few = "base-2 LSE", ("W2", "W3", "L1", "O2")
    monkeypatch.setattr(redundancy, "CHECKS", [c for c in redundancy.CHECKS if c.id in few])
    assert failed_checks(error) == ("L1", "O2")
    wrong = [["W2", "page_size-1"], ["L1", "no such case"], ["L9", "all"]]
    for recorded in (wrong, []):
        monkeypatch.setattr(redundancy, "RECORDED", {error: recorded})
        assert failed_checks(error) == failed_checks(error, most=2) == ("L1", "O2")
    monkeypatch.setattr(redundancy, "CHECKS", [c for c in redundancy.CHECKS if c.id != "O2"])
    assert failed_checks(error, most=2) == ("L1",)


def test_recorded_cases_are_of_existing_errors() -> None:
    assert redundancy.RECORDED.keys() <= ERRORS.keys()


def test_a_check_that_alone_detects_an_error_is_named() -> None:
    detected = {"a": ("V2", "W2"), "b": ("O1",), "c": ()}
    found = undetected_without(detected)
    assert found["O1"] == ["b", "c"]
    assert found["V2"] == found["W2"] == ["c"]


def test_the_script_fails_for_an_error_that_one_check_detects(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [check for check in redundancy.CHECKS if check.id in ("W2", "L1", "F1", "R1")]
    monkeypatch.setattr(redundancy, "CHECKS", few)
    assert main(["unsupported without a reason"]) == 0
    assert re.search("unsupported without a reason: .*F1.*R1", capsys.readouterr().out)
    monkeypatch.setattr(redundancy, "failed_checks", lambda error, quick: ("R1",))
    assert main(["unsupported without a reason"]) == 1
    assert "without R1: 'unsupported without a reason' passes" in capsys.readouterr().out
