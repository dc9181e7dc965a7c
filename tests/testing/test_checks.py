"""Each wrong backend fails the check that is meant to detect it; a correct backend passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.spec import AttentionSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.checks import CHECKS
from attnlib.testing.checks.visibility import NAN_OUTPUT
from attnlib.testing.conformance import run_conformance
from attnlib.testing.outcome import Outcome
from tests.testing.toy_backend import ToyBackend, ToyImpl, toy_with
from tests.testing.wrong_backends import WRONG
from tests.testing.wrong_states import WRONG_STATES


@pytest.mark.slow
def test_a_correct_backend_passes_all_checks() -> None:
    """Rules out checks that fail for every backend."""
    report = run_conformance(ToyBackend, device="cpu", against=["torch"])
    assert report.passed, str(report)
    assert report.count(Outcome.PASS) > 200


class _OnlyLatents(ToyBackend):
    """Serves latents (P10) and nothing else, as FlashMLA does."""

    @classmethod
    def validate_configuration(cls, spec: AttentionSpec, device: Any) -> list[str]:
        return [] if spec.use_mla else ["no latents"]


def test_all_cases_of_a_backend_over_latents_are_possible() -> None:
    """A case whose spec is refused by the contract would count as a failure of the backend."""
    target = BackendUnderTest(_OnlyLatents, "latents", torch.device("cpu"))
    assert target.base_case.use_mla
    cases = [each.case for check in CHECKS for each in check.cases(target) if each.case]
    assert len(cases) > 500 and all(case.spec for case in cases)


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
    meant = {check for _, check in (*WRONG.values(), *WRONG_STATES.values())}
    assert meant == cpu_checks
    assert len({backend for backend, _ in WRONG.values()}) >= 15


@pytest.mark.parametrize("error", ["base-2 LSE", "interleaved heads"])
def test_other_errors_do_not_count_as_an_ignored_parameter(error: str) -> None:
    """The output without a parameter has its own limit: its effect is no error."""
    report = run_conformance(WRONG[error][0], device="cpu", against=[], only="F1,S1,S2", quick=True)
    assert {result.check for result in report.failures} == {"F1", "S1", "S2"}
    assert not [result.id for result in report.failures if "is ignored" in result.message]


@pytest.mark.parametrize(
    ("error", "ignored"),
    [
        ("ignored soft cap", "soft_cap is ignored"),
        ("ignored score function", "the score function is ignored"),
        ("ignored selection", "the selection is ignored"),
    ],
)
def test_an_ignored_parameter_is_named(error: str, ignored: str) -> None:
    backend, check = WRONG[error]
    report = run_conformance(backend, device="cpu", against=[], only=check, quick=True)
    assert ignored in report.failures[0].message


def test_the_kv_head_that_a_query_head_reads_is_named() -> None:
    report = run_conformance(WRONG["interleaved heads"][0], device="cpu", against=[], quick=True)
    text = str(report)
    assert "start here: W3/group-2-decode (which KV head each query head reads)" in text
    assert "query head 1 reads the values of KV head 1; expected 0" in text
    assert "which is h % num_kv_heads" in text
    keys = run_conformance(
        WRONG["keys of interleaved heads"][0], device="cpu", against=[], quick=True, only="W3"
    )
    assert "query head 1 reads the keys of KV head 1; expected 0" in str(keys)


class _ConsecutiveBlocks(ToyImpl):
    """Reads the blocks behind the first one of a request, whatever the block table says."""

    def gather(
        self, cache: PagedKVCache, row: torch.Tensor, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = (row[0] + torch.arange(len(row))) % cache.num_blocks
        return super().gather(cache, blocks, seq_len)


def test_the_cause_of_wrong_keys_is_named() -> None:
    """NaN is no empty set of keys, and what follows the first block has the rule of the table."""
    blocks = run_conformance(toy_with(_ConsecutiveBlocks), device="cpu", against=[], only="W2,W3")
    assert (
        "sees keys 0-15; expected 0-17: no key of block table entry 1 and later ones (P3)"
        in str(blocks)
    )
    unused = run_conformance(WRONG["NaN from unused V"][0], device="cpu", against=[], only="W2,W3")
    assert unused.failed_checks() == ("W2", "W3")
    assert all(f" {NAN_OUTPUT} | case: " in result.message for result in unused.failures)


def test_padding_rows_do_not_make_the_lse_suspicious() -> None:
    """Only the output is wrong, and the report starts with the cases that say so."""
    report = run_conformance(WRONG["padding rows not written"][0], device="cpu", only="L1,N2,N3")
    (start,) = [line for line in str(report).splitlines() if line.startswith("start here: ")]
    assert start.startswith("start here: N2/only-padding")
