"""Tiny tensors: a second thread only waits for the first."""

from __future__ import annotations

from tests.testing.conftest import one_thread

__all__ = ["one_thread"]
