"""Each wrong backend fails the check that is meant to detect it; a correct backend passes."""

from __future__ import annotations

import pytest

from attnlib.testing.checks import CHECKS
from attnlib.testing.conformance import run_conformance
from attnlib.testing.outcome import Outcome
from tests.testing.toy_backend import ToyBackend
from tests.testing.wrong_backends import WRONG


@pytest.mark.slow
def test_a_correct_backend_passes_all_checks() -> None:
    """Rules out checks that fail for every backend."""
    report = run_conformance(ToyBackend, device="cpu", against=["torch"])
    assert report.passed, str(report)
    assert report.count(Outcome.PASS) > 200


@pytest.mark.parametrize("error", WRONG)
def test_each_wrong_backend_fails_its_check(error: str) -> None:
    """V5: the check that is meant to detect the error fails, and the report names it."""
    backend, check = WRONG[error]
    report = run_conformance(backend, device="cpu", quick=True, against=[ToyBackend], only=check)
    assert not report.passed
    assert report.failed_checks() == (check,), str(report)
    assert f"FAIL {check}/" in str(report)


@pytest.mark.parametrize("error", ["off-by-one window", "sink counted per split", "base-2 LSE"])
def test_the_reproduction_line_runs_only_the_failed_case(error: str) -> None:
    backend, check = WRONG[error]
    report = run_conformance(backend, device="cpu", quick=True, against=[], only=check)
    first = report.failures[0]
    assert f'only="{first.id}", seed=0' in first.reproduce
    again = run_conformance(backend, device="cpu", quick=True, against=[], only=first.id)
    assert [result.id for result in again.results] == [first.id]
    assert again.failures[0].message == first.message


def test_each_check_that_runs_on_a_cpu_has_a_wrong_backend() -> None:
    cpu_checks = {check.id for check in CHECKS if not check.needs_gpu}
    assert {check for _, check in WRONG.values()} == cpu_checks
    assert len({backend for backend, _ in WRONG.values()}) >= 15
