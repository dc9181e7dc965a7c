"""`run_conformance`: outcomes, reports, coverage and filters."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.testing.check import Check, CheckCase, matches_filter, run_check
from attnlib.testing.checks import CHECKS
from attnlib.testing.conformance import count_cases, make_target, run_conformance
from attnlib.testing.outcome import CaseResult, NotRun, Outcome, UnsupportedCase
from attnlib.testing.report import render_report, report_to_json
from tests.testing.toy_backend import ToyBackend, ToyImpl, toy_with
from tests.testing.wrong_backends import BaseTwoLse


class Broken(ToyImpl):
    """Raises an exception in every forward."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("not implemented")


def test_the_torch_backend_passes() -> None:
    """H1: the reference backend passes on a CPU, with caches exchanged with another backend."""
    report = run_conformance("torch", device="cpu", quick=True, against=[ToyBackend])
    assert report.passed, str(report)
    assert {result.check for result in report.results} == {check.id for check in CHECKS}
    assert not report.coverage.not_stated


@pytest.mark.slow
def test_other_seeds_give_the_same_outcome() -> None:
    """V4: the outcome does not depend on the seed; other tests use seed 0. `attnlib verify torch
    --seeds 20` runs more."""
    for seed in (1, 2):
        report = run_conformance("torch", device="cpu", seed=seed, quick=True, against=[])
        assert report.passed, f"seed {seed}\n{report}"


def test_an_exception_is_a_failure_with_its_location_and_case() -> None:
    report = run_conformance(toy_with(Broken), device="cpu", against=[], only="V2/batch-decode")
    assert not report.passed
    (failure,) = report.failures
    assert "raised ValueError: not implemented (test_conformance.py:" in failure.message
    assert "case: batch=" in failure.message
    assert failure.reproduce.startswith('run_conformance(Changed, only="V2/batch-decode", seed=0')


def test_a_backend_that_supports_nothing_does_not_pass() -> None:
    report = run_conformance(toy_with(sink=False), device="cpu", against=[], only="L3")
    assert not report.failures
    assert report.count(Outcome.UNSUPPORTED) == len(report.results) > 0
    assert not report.passed


def test_operations_that_a_backend_has_not_are_unsupported() -> None:
    """M14, P14: `get_operation` of the base class returns None."""
    report = run_conformance(ToyBackend, device="cpu", against=[], only="I1,A2", quick=True)
    assert {result.check for result in report.results} == {"I1", "A2"}
    assert all(result.outcome is Outcome.UNSUPPORTED for result in report.results)
    assert "operation select_keys: not supported (I1/" in render_report(report)


def test_a_backend_without_common_sizes_raises_with_the_reasons() -> None:
    with pytest.raises(
        ContractError,
        match="supports none of the common cases on cpu; reasons for the first one: .*dtype",
    ):
        run_conformance(toy_with(dtypes=(torch.float64,)), device="cpu", against=[])


def test_gpu_checks_without_a_gpu_are_not_run() -> None:
    report = run_conformance(ToyBackend, device="cpu", against=[], only="P2")
    (result,) = report.results
    assert result.outcome is Outcome.NOT_RUN
    assert result.message == "needs a GPU, runs on cpu"


def test_coverage_of_declared_capabilities() -> None:
    """A capability counts as exercised only if a passing case uses it."""
    from attnlib.capabilities import NOT_STATED

    backend = toy_with(alibi=False, mla=NOT_STATED)
    report = run_conformance(
        backend, device="cpu", against=[], only="V2/batch-decode,V2/window+sinks-chunked"
    )
    coverage = report.coverage
    assert {"sink", "sliding_window", "dtypes:float32", "lse", "devices:cpu"} <= set(
        coverage.exercised
    )
    assert {"logits_soft_cap", "dtypes:float16", "devices:cuda"} <= set(coverage.not_exercised)
    assert "alibi" in coverage.not_supported
    assert coverage.not_stated == ("mla",)
    assert (
        f"{len(coverage.exercised)}/{coverage.num_declared} declared capabilities exercised"
        in str(coverage)
    )
    assert "declared capabilities" not in str(report), "a part of the suite has no coverage"
    assert str(coverage) in str(replace(report, only=None))


def test_a_failed_case_exercises_nothing() -> None:
    report = run_conformance(toy_with(Broken), device="cpu", against=[], only="V2/batch-decode")
    assert report.coverage.exercised == ()


def test_the_report_shows_failures_skipped_cases_and_the_counts() -> None:
    report = run_conformance(
        toy_with(Broken, sink=False), device="cpu", against=[], only="V2/batch-*,L3,G4", quick=True
    )
    text = render_report(report)
    assert "FAIL V2/batch-decode and 7 more of V2: raised ValueError" in text
    assert "     reproduce: run_conformance(Changed, " in text
    assert text.count("FAIL ") == text.count("reproduce: ") == 1
    start = text.splitlines()[-2]
    assert start.startswith("start here: all 8 failed cases raised ValueError: ")
    assert start.endswith("; the first is V2/batch-decode")
    assert "unsupported: attention sinks: not supported (L3/" in text
    assert "not run: needs a GPU, runs on cpu (G4/all)" in text
    assert "8 failed" in text.splitlines()[-1]
    assert text.splitlines()[-1].endswith("FAILED")


def test_the_report_starts_with_the_most_specific_check() -> None:
    """One failed case per check in two lines; the wrong base of the LSE fails many checks."""
    report = run_conformance(toy_with(BaseTwoLse), device="cpu", against=[], quick=True)
    lines = render_report(report).splitlines()
    assert len(report.failures) > 20
    failed = [line for line in lines if line.startswith("FAIL ")]
    assert len(failed) == len(report.failed_checks()) > 2
    assert failed[0].startswith("FAIL L1/decode and ")
    assert " more of L1: the LSE is a base-2 log" in failed[0]
    (start,) = [line for line in lines if line.startswith("start here: ")]
    assert start.startswith("start here: L1/decode (the LSE is the natural log")
    assert f"the most specific of {len(failed)} failed checks" in start


def test_a_report_without_failures_has_no_start() -> None:
    report = run_conformance(ToyBackend, device="cpu", against=[], only="L1", quick=True)
    assert "start here" not in render_report(report)


def test_json_contains_all_results() -> None:
    report = run_conformance(ToyBackend, device="cpu", against=[], only="W2", quick=True)
    data = json.loads(report_to_json(report))
    assert data["version"] == 2
    assert data["passed"] is True
    assert data["counts"]["pass"] == len(data["results"]) == len(report.results)
    assert data["results"][0]["reproduce"].startswith("attnlib verify ")


def test_counting_does_not_run_cases() -> None:
    target = make_target(toy_with(Broken), device="cpu", against=[], quick=True)
    total = count_cases(target)
    assert total == len(
        run_conformance(toy_with(Broken), device="cpu", against=[], quick=True).results
    )


def test_case_ids_are_unique() -> None:
    """A reproduction line names one case."""
    target = make_target("torch", device="cpu")
    for check in CHECKS:
        ids = [case.id for case in check.cases(target)] if not check.needs_gpu else []
        assert len(set(ids)) == len(ids), check.id


@pytest.mark.parametrize(
    ("only", "check", "case", "expected"),
    [
        (None, "W2", "causal", True),
        ("W2", "W2", "causal", True),
        ("W2/causal", "W2", "causal", True),
        ("W2/causal", "W2", "chunk", False),
        ("W2/window-*,F1", "W2", "window-2-decode", True),
        ("W2/window-*,F1", "F1", "sinks-decode", True),
        ("F?", "F1", "sinks-decode", True),
        ("F1", "W2", "causal", False),
    ],
)
def test_only_selects_checks_and_cases(
    only: str | None, check: str, case: str, expected: bool
) -> None:
    assert matches_filter(check, case, only) is expected


def test_a_case_has_one_of_four_outcomes() -> None:
    def unsupported() -> str:
        raise UnsupportedCase(["too big: 9 > 8"])

    def not_run() -> str:
        raise NotRun("not on this machine")

    checks = [
        CheckCase("a", lambda: ""),
        CheckCase("b", lambda: "wrong"),
        CheckCase("c", unsupported),
        CheckCase("d", not_run),
    ]
    target = make_target(ToyBackend, device="cpu", against=[])
    seen: list[CaseResult] = []
    results = run_check(
        Check("X1", "a test", lambda _: iter(checks)), target, on_result=seen.append
    )
    assert [o.outcome for o in results] == [
        Outcome.PASS,
        Outcome.FAIL,
        Outcome.UNSUPPORTED,
        Outcome.NOT_RUN,
    ]
    assert [o.message for o in results] == ["", "wrong", "too big: 9 > 8", "not on this machine"]
    assert seen == results


def test_checks_after_a_cuda_error_are_not_run() -> None:
    """A CUDA error makes all later CUDA calls fail; only the first case is reported as failed."""

    def crash() -> str:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    checks = [
        Check("X1", "crashes", lambda _: iter([CheckCase("a", crash)])),
        Check("X2", "passes", lambda _: iter([CheckCase("a", lambda: "")])),
    ]
    report = run_conformance(ToyBackend, device="cpu", against=[], checks=checks)
    assert [result.id for result in report.failures] == ["X1/a"]
    assert report.results[1].message == "X1/a left the CUDA context in an error state"


def test_cases_run_without_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATTNLIB_VALIDATE=1 refuses batches that kernels must serve: rows without keys, partial
    caches."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    report = run_conformance("torch", device="cpu", quick=True, only="N2,L2")
    assert report.passed, str(report)
    assert os.environ["ATTNLIB_VALIDATE"] == "1"
