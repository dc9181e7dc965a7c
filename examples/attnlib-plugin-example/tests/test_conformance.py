"""attnlib's own exam is this package's test suite: every case of every probe is a test."""

from __future__ import annotations

from attnlib.testing import BackendConformance


class TestGatherSdpa(BackendConformance):
    backend = "gather_sdpa"
