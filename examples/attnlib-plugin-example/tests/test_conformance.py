"""The conformance suite as the test suite of this package: one test for each case."""

from __future__ import annotations

from attnlib.testing import BackendConformance


class TestGatherSdpa(BackendConformance):
    backend = "gather_sdpa"
