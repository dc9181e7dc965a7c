"""A suite about the suite: every wrong backend is failed by the probe that is meant for it, a right one by none."""

from __future__ import annotations

import pytest

from attnlib.testing.checks import CHECKS
from attnlib.testing.conformance import run_conformance
from attnlib.testing.outcome import Outcome
from tests.testing.toy_backend import ToyBackend
from tests.testing.wrong_backends import WRONG


def test_the_toy_itself_is_right() -> None:
    """Without this, the suite could fail everything and look strict."""
    report = run_conformance(ToyBackend, device="cpu", against=["torch"])
    assert report.passed, str(report)
    assert report.count(Outcome.PASS) > 200


@pytest.mark.parametrize("what", WRONG)
def test_every_wrong_backend_is_failed_by_its_probe(what: str) -> None:
    """V5: the outcome is a failure, and the probe meant for the mistake is named in the report."""
    backend, probe = WRONG[what]
    report = run_conformance(backend, device="cpu", quick=True, against=[ToyBackend])
    assert not report.passed
    assert probe in report.failed_checks(), (
        f"{probe} missed it; failed were {report.failed_checks()}\n{report}"
    )
    assert f"FAIL {probe}/" in str(report) or len(report.failures) > 20


@pytest.mark.parametrize("what", ["off-by-one window", "sink counted per split", "base-2 LSE"])
def test_the_failure_reproduces_by_its_own_line(what: str) -> None:
    """The printed line runs that case alone, and it fails again."""
    backend, probe = WRONG[what]
    report = run_conformance(backend, device="cpu", quick=True, against=[], only=probe)
    first = report.failures[0]
    assert f'only="{first.id}", seed=0' in first.reproduce
    again = run_conformance(backend, device="cpu", quick=True, against=[], only=first.id)
    assert [result.id for result in again.results] == [first.id]
    assert again.failures[0].message == first.message


def test_every_probe_that_runs_on_a_cpu_has_caught_somebody() -> None:
    """A probe that no mistake trips could be vacuous."""
    needed = {probe.id for probe in CHECKS if not probe.needs_gpu}
    assert {probe for _, probe in WRONG.values()} == needed
    assert len({backend for backend, _ in WRONG.values()}) >= 15
