"""The exam as a pytest class, for backends with a test suite of their own.

    from attnlib.testing.suite import BackendConformance

    class TestMyBackend(BackendConformance):
        backend = "my_pkg:MyBackend"
        expected_failures = {"D1/chunks-of-16": "issue 12: chunks change the order of the sum"}

Every case is a test of its own. A refusal and a case that cannot run here are skips with their reason. Expected
failures are strict: one that passes is an error, so the list can only shrink.
"""

from __future__ import annotations

from typing import Any, ClassVar

from attnlib.backends.base import AttentionBackend
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import Check, CheckCase, run_check_case, select_cases
from attnlib.testing.checks import CHECKS
from attnlib.testing.conformance import make_target
from attnlib.testing.outcome import CaseResult, Outcome

__all__ = ["BackendConformance", "ConformanceCase", "ConformanceError", "collect_cases"]


class ConformanceError(AssertionError):
    """A case failed; the text is the probe's message and the line that reproduces it."""


class ConformanceCase:
    """One check bound to its probe and target, ready to run."""

    def __init__(self, probe: Check, check: CheckCase, target: BackendUnderTest) -> None:
        self.probe, self.check, self.target = probe, check, target

    @property
    def id(self) -> str:
        """PROBE/CASE."""
        return f"{self.probe.id}/{self.check.id}"

    def run(self) -> CaseResult:
        """Run it to its result."""
        return run_check_case(self.probe, self.check, self.target)

    def run_as_test(self) -> None:
        """Run it as pytest wants it: raise for a failure, skip for a refusal."""
        import pytest

        result = self.run()
        if result.outcome is Outcome.FAIL:
            raise ConformanceError(f"{result.message}\nreproduce: {result.reproduce}")
        if result.outcome is not Outcome.PASS:
            pytest.skip(f"{result.outcome.value}: {result.message}")


def collect_cases(
    backend: str | type[AttentionBackend],
    *,
    device: str | None = None,
    seed: int = 0,
    quick: bool = False,
    only: str | None = None,
) -> list[ConformanceCase]:
    """All cases of a backend's exam, in order, none run yet."""
    target = make_target(backend, device=device, seed=seed, quick=quick)
    return [
        ConformanceCase(probe, check, target)
        for probe in CHECKS
        for check in select_cases(probe, target, only)
    ]


class BackendConformance:
    """Subclass it, name the backend, and pytest runs the exam case by case.

    Attributes:
        backend: a name, a `module:Class` path or a class.
        device, seed, quick, only: as in `run_conformance`.
        expected_failures: PROBE/CASE -> why it fails; strict.
    """

    backend: ClassVar[str | type[AttentionBackend] | None] = None
    device: ClassVar[str | None] = None
    seed: ClassVar[int] = 0
    quick: ClassVar[bool] = False
    only: ClassVar[str | None] = None
    expected_failures: ClassVar[dict[str, str]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One parameter per case."""
        import pytest

        if "attnlib_case" not in metafunc.fixturenames:
            return
        if self.backend is None:
            metafunc.parametrize("attnlib_case", [])
            return
        cases = collect_cases(
            self.backend, device=self.device, seed=self.seed, quick=self.quick, only=self.only
        )
        metafunc.parametrize(
            "attnlib_case",
            [
                pytest.param(
                    case,
                    id=case.id,
                    marks=[pytest.mark.xfail(reason=self.expected_failures[case.id], strict=True)]
                    if case.id in self.expected_failures
                    else [],
                )
                for case in cases
            ],
        )

    def test_conformance(self, attnlib_case: ConformanceCase) -> None:
        """One case of the exam."""
        attnlib_case.run_as_test()
