"""Two checks detect each error of `wrong_backends`, but for those that `ONE_CHECK` lists."""

from __future__ import annotations

import pytest

from tests.testing.redundancy import ONE_CHECK, failed_checks, main, undetected_without
from tests.testing.wrong_at_scale import SUBTLE
from tests.testing.wrong_backends import WRONG

FAST = (
    "written slot -1", "mapping length ignored", "score function after the mask",
    "soft cap after the mask", "query tokens from 64 on",
)  # fmt: skip


@pytest.mark.parametrize("error", FAST)
def test_two_checks_detect_the_error(error: str) -> None:
    assert len(failed_checks(error)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("error", [error for error in WRONG if error not in FAST])
def test_every_other_error_has_two_checks_or_a_reason(error: str) -> None:
    detected = failed_checks(error)
    assert len(detected) == 1 if error in ONE_CHECK else len(detected) >= 2, detected


def test_listed_errors_exist_and_have_no_size_limit() -> None:
    assert set(ONE_CHECK) <= set(WRONG)
    assert not set(ONE_CHECK) & set(SUBTLE)


def test_a_check_that_alone_detects_an_error_is_named() -> None:
    detected = {"a": ("V2", "W2"), "b": ("O1",), "c": ()}
    found = undetected_without(detected)
    assert found["O1"] == ["b", "c"]
    assert found["V2"] == found["W2"] == ["c"]


def test_the_script_prints_checks_and_fails_for_an_unlisted_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["unsupported without a reason"]) == 0
    assert "without R1: 'unsupported without a reason' passes" in capsys.readouterr().out
    monkeypatch.setattr("tests.testing.redundancy.ONE_CHECK", {})
    assert main(["unsupported without a reason"]) == 1
