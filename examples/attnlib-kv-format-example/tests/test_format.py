"""The checks of `attnlib verify --kv-format` as the test suite of this package."""

from __future__ import annotations

from attnlib.testing import run_conformance


def test_the_format() -> None:
    report = run_conformance("torch", device="cpu", kv_format="example:rotated4")
    assert report.passed, report
