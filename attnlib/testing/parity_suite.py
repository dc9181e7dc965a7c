"""Parity as a pytest class: every ordered pair of backends, one test for each call.

    from attnlib.testing import BackendParity

    class TestAgainstTorch(BackendParity):
        backends = ("my_pkg:MyBackend",)
        against = ("torch",)

A test is skipped, with its reason, if one of the two backends does not support the call. Expected
failures are strict: an expected failure that passes is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from attnlib.backends.base import AttentionBackend
from attnlib.errors import ContractError
from attnlib.testing.outcome import Outcome
from attnlib.testing.pair_cases import PairCase
from attnlib.testing.pair_run import Pair
from attnlib.testing.parity import make_pairs
from attnlib.testing.suite import ConformanceError, parametrize_cases

__all__ = ["BackendParity", "ParityTest", "collect_pairs"]


class ParityTest:
    """One call of one pair.

    Args:
        pair: the backends.
        case: the call.
    """

    def __init__(self, pair: Pair, case: PairCase | ContractError) -> None:
        self.pair, self.case = pair, case

    @property
    def id(self) -> str:
        """WRITER-to-READER/CALL."""
        return f"{self.pair.id}/{self.case.name if isinstance(self.case, PairCase) else 'all'}"

    def run_as_test(self) -> None:
        """Run the call as a pytest test.

        Raises:
            ConformanceError: the two differ; the text has the rule and the first row.
            pytest.skip.Exception: one of the two does not support the call.
        """
        import pytest

        cell = self.pair.run(self.case)
        if cell.outcome is Outcome.FAIL:
            raise ConformanceError(
                f"{cell.writer} writes, {cell.reader} reads: {cell.message}\n"
                f"reproduce: {cell.reproduce}"
            )
        if cell.outcome is not Outcome.PASS:
            pytest.skip(f"{cell.outcome.value}: {cell.message}")


def collect_pairs(
    backends: Sequence[str | type[AttentionBackend]] | None = None,
    against: Sequence[str | type[AttentionBackend]] | None = None,
    *,
    device: str | None = None,
    seed: int = 0,
    only: str | None = None,
) -> list[ParityTest]:
    """The selected calls of all pairs, in order; arguments and errors as in `make_pairs`."""
    calls = make_pairs(backends, against, device=device, seed=seed, only=only)
    return [ParityTest(pair, case) for pair, case in calls]


class BackendParity:
    """Base class of a pytest class that compares backends pairwise.

    Attributes:
        backends: names, `module:Class` paths or classes; () for all that are available.
        against: backends to compare these with, or ("all",); () compares them with each other.
        device, seed, only: as in `run_parity`.
        expected_failures: WRITER-to-READER/CALL -> reason; strict.
    """

    backends: ClassVar[Sequence[str | type[AttentionBackend]]] = ()
    against: ClassVar[Sequence[str | type[AttentionBackend]]] = ()
    device: ClassVar[str | None] = None
    seed: ClassVar[int] = 0
    only: ClassVar[str | None] = None
    expected_failures: ClassVar[dict[str, str]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize `test_parity` with the calls of all pairs."""
        if "attnlib_pair" not in metafunc.fixturenames:
            return
        pairs = collect_pairs(
            self.backends or None,
            self.against or None,
            device=self.device,
            seed=self.seed,
            only=self.only,
        )
        parametrize_cases(metafunc, "attnlib_pair", pairs, self.expected_failures)

    def test_parity(self, attnlib_pair: ParityTest) -> None:
        """Run one call of one pair."""
        attnlib_pair.run_as_test()
