"""The conformance suite as a pytest class, for backends with their own test suite.

    from attnlib.testing import BackendConformance

    class TestMyBackend(BackendConformance):
        backend = "my_pkg:MyBackend"
        expected_failures = {"D1/chunks-of-16": "issue 12: chunks change the order of the sum"}

Each case is one test. Unsupported cases and cases that cannot run are skipped with their reason.
Expected failures are strict: an expected failure that passes is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attnlib.backends.base import AttentionBackend
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import Check, CheckCase, check_filter, run_check_case, select_cases
from attnlib.testing.checks import CHECKS
from attnlib.testing.conformance import make_target
from attnlib.testing.outcome import CaseResult, Outcome

__all__ = [
    "BackendConformance",
    "ConformanceCase",
    "ConformanceError",
    "collect_cases",
    "parametrize_cases",
]


class ConformanceError(AssertionError):
    """A case failed; the text is the error message and the reproduction line."""


class ConformanceCase:
    """A case with its check and its backend under test.

    Args:
        check: the check that the case belongs to.
        case: the case.
        target: the backend under test.
    """

    def __init__(self, check: Check, case: CheckCase, target: BackendUnderTest) -> None:
        self.check, self.case, self.target = check, case, target

    @property
    def id(self) -> str:
        """CHECK/CASE."""
        return f"{self.check.id}/{self.case.id}"

    def run(self) -> CaseResult:
        """Run the case."""
        return run_check_case(self.check, self.case, self.target)

    def run_as_test(self) -> None:
        """Run the case as a pytest test.

        Raises:
            ConformanceError: the case failed.
            pytest.skip.Exception: the case is unsupported or cannot run.
        """
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
    """The selected cases for a backend, in order; arguments as in `run_conformance`.

    Raises:
        ContractError: a part of `only` selects no case.
    """
    target = make_target(backend, device=device, seed=seed, quick=quick)
    check_filter(CHECKS, target, only)
    return [
        ConformanceCase(check, case, target)
        for check in CHECKS
        for case in select_cases(check, target, only)
    ]


def parametrize_cases(
    metafunc: Any, name: str, cases: Sequence[Any], expected_failures: Mapping[str, str]
) -> None:
    """Parametrize the argument `name` of a test with cases; those that are expected to fail are
    strict xfails."""
    import pytest

    def marks(case: Any) -> list[Any]:
        reason = expected_failures.get(case.id)
        return [] if reason is None else [pytest.mark.xfail(reason=reason, strict=True)]

    metafunc.parametrize(
        name, [pytest.param(case, id=case.id, marks=marks(case)) for case in cases]
    )


class BackendConformance:
    """Base class of a pytest class that runs the conformance suite.

    Attributes:
        backend: a name, a `module:Class` path or a class.
        device, seed, quick, only: as in `run_conformance`.
        expected_failures: CHECK/CASE -> reason; strict.
    """

    backend: ClassVar[str | type[AttentionBackend] | None] = None
    device: ClassVar[str | None] = None
    seed: ClassVar[int] = 0
    quick: ClassVar[bool] = False
    only: ClassVar[str | None] = None
    expected_failures: ClassVar[dict[str, str]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize `test_conformance` with the cases."""
        if "attnlib_case" not in metafunc.fixturenames:
            return
        cases: list[ConformanceCase] = []
        if self.backend is not None:
            cases = collect_cases(
                self.backend, device=self.device, seed=self.seed, quick=self.quick, only=self.only
            )
        parametrize_cases(metafunc, "attnlib_case", cases, self.expected_failures)

    def test_conformance(self, attnlib_case: ConformanceCase) -> None:
        """Run one case."""
        attnlib_case.run_as_test()
